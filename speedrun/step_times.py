# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Ratio of the step time of an entry to that of its track's baseline: `torchditan speedrun earth flow_matching --time`.

Notable:
- the entries take turns: 30 steps of the baseline, 30 of the entry, and again. A drift of the machine affects both;
- each has its own process, which waits without using the processor while the other one trains;
- the ratio is the median over the turns. It is not reported if their interquartile range exceeds 20% of it;
- a step is the whole step of the trainer: data, loss, backward, clipping, optimizer and averages.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from speedrun.entries import Entry, register
from torchditan.errors import ConfigError
from torchditan.run.atomic_files import write_file
from torchditan.run.provenance import cpu_name, git_commit

STEPS = 30
MOST_SPREAD = 0.2
"""Largest interquartile range of the ratios, relative to their median, with which a ratio is reported."""


class Worker:
    """A process that trains an entry for some steps whenever it is asked."""

    def __init__(self, entry: Entry, folder: Path, *, steps: int = STEPS) -> None:
        context = multiprocessing.get_context("spawn")
        self.entry, self.steps = entry, steps
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(entry, folder, other))
        self.process.start()
        other.close()

    def block(self) -> float:
        """Seconds of one step, averaged over a block."""
        with contextlib.suppress(BrokenPipeError):  # it failed, and said why
            self.connection.send(self.steps)
        try:
            found: float | str = self.connection.recv()
        except EOFError:
            found = "it ended without a message"
        if isinstance(found, str):
            raise ConfigError(f"{self.entry.name}: its training failed: {found}")
        return found / self.steps

    def close(self) -> None:
        self.connection.close()
        self.process.join()


def ratio_of(ratios: Sequence[float]) -> dict[str, Any]:
    """Median and interquartile range of the ratios of the turns; no median if they are too far apart."""
    first, _, third = quantiles(ratios, n=4, method="inclusive")
    middle = median(ratios)
    is_steady = third - first <= MOST_SPREAD * middle
    return {"ratio": middle if is_steady else None, "quartiles": [first, third], "ratios": list(ratios)}


def measure(baseline: Entry, entry: Entry, *, turns: int, steps: int = STEPS) -> dict[str, Any]:
    """Alternate blocks of both and compare them."""
    load_average = os.getloadavg()[0]
    os.environ.update(entry.track.variables)  # of the workers
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workers = []
        for name, each in (("before", baseline), ("after", entry)):
            workers.append(Worker(each, Path(folder) / name, steps=steps))
            stack.callback(workers[-1].close)
        for worker in workers:
            worker.block()  # warms up
        blocks = [[worker.block() for worker in workers] for _ in range(turns)]
    return {
        "baseline": baseline.name,
        "baseline_recipe": baseline.recipe(),
        "entry": entry.name,
        "cpu": cpu_name(),
        "commit": git_commit(),
        "load_average": load_average,
        "seconds": blocks,
        **ratio_of([after / before for before, after in blocks]),
    }


def work(entry: Entry, folder: Path, connection: Connection) -> None:
    """The worker: builds the trainer as `torchditan train` does, and trains as many steps as it is sent."""
    from torchditan.config.loader import load_config
    from torchditan.job.prepare import prepare
    from torchditan.trainer import Trainer

    class BlockTrainer(Trainer):
        def train_steps(self) -> None:
            batches = self.open_stream()
            self.supervision.start_step = 0
            with contextlib.suppress(EOFError):  # the other end was closed
                while True:
                    num_steps = connection.recv()
                    started = time.perf_counter()
                    for _ in range(num_steps):
                        self.train_step(batches)
                    connection.send(time.perf_counter() - started)

    register(entry.registry, entry.code)
    place = [f"--job.dump_folder={folder}", f"--metrics.experiment_name={entry.name}"]
    folder.mkdir()
    with open(folder / "log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            job = prepare(load_config([*entry.flags(seed=0), *place]))
            assert job is not None
            BlockTrainer(job).train()
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


def measure_and_write(baseline: Entry, entry: Entry, *, turns: int = 7, steps: int = STEPS) -> None:
    """`measure`, into the results of the track."""
    path = entry.track.results / "step_times.json"
    times = json.loads(path.read_bytes()) if path.exists() else {}
    times[entry.recipe()] = found = measure(baseline, entry, turns=turns, steps=steps)
    write_file(path, json.dumps(times, indent=2).encode() + b"\n")
    shown = "not reported: too noisy" if found["ratio"] is None else f"{found['ratio']:.3f}"
    first, third = found["quartiles"]
    print(f"{entry.name}: {shown}, quartiles {first:.3f} and {third:.3f}, load {found['load_average']:.2f} before")
