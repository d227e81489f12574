#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Time from the command to the first step, by phase: `python benchmarks/start_time.py`, with `--compile` compiled.

Notable:
- every start is a new process that runs train.py's own `main` and ends after its first step;
- compiled starts come in pairs: the first with an empty cache on disk, the second with what the first one left there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

PHASES = ("imports", "options and data", "build", "first batch", "first step")
TARGETS = {"eager": 3.5, "compiled": 0.3}
"""Seconds of the quickstart; time of a second compiled start, as a multiple of the first."""


class Started(BaseException):
    """Ends train.py after the first step."""


def start(flags: list[str]) -> dict[str, float]:
    """Run train.py in this process up to its first step. Returns the time at which each phase ended."""
    from torchditan.distributed.cpu_threads import limit_spinning

    limit_spinning()

    import torch

    from torchditan.job import prepare
    from torchditan.trainer import Trainer

    ends = {"imports": time.time()}

    def marking(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            ends[phase] = time.time()
            return result

        return call

    def first_step(trainer: Any, batches: Any) -> None:
        step(trainer, batches)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        ends["first step"] = time.time()
        raise Started

    step = Trainer.train_step
    prepare.build_dataset = marking("options and data", prepare.build_dataset)  # type: ignore[attr-defined]
    Trainer.__init__ = marking("build", Trainer.__init__)  # type: ignore[method-assign]
    Trainer.open_stream = marking("first batch", Trainer.open_stream)  # type: ignore[method-assign]
    Trainer.train_step = first_step  # type: ignore[assignment]
    sys.argv = ["train.py", *flags]
    from torchditan.commands import train

    try:
        train.main()
    except Started:
        return ends
    raise AssertionError("it ended without a step")


def measure(flags: Sequence[str], *, cache: Path | None = None) -> dict[str, float]:
    """Seconds of each phase of one start, and in total.

    Args:
        flags: of train.py.
        cache: folder of torch.compile's cache; None: the user's.
    """
    from torchditan.extras.ablation.launch import (  # not at the top: a started process imports what train.py does
        Job,
        execute,
    )

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "phases.json"
        place = [f"--job.dump_folder={folder}", "--metrics.experiment_name=start"]
        variables = {} if cache is None else {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        program = (__file__, "--start", str(report), *flags, *place)
        outcome = execute(Job(program, Path(folder) / "job", variables=variables))
        if not report.exists():
            raise SystemExit(f"the start failed: {outcome.reason}")
        ends = json.loads(report.read_text())
    begin = outcome.started
    seconds, before = {}, begin
    for phase in PHASES:
        seconds[phase] = ends[phase] - before
        before = ends[phase]
    return {**seconds, "total": before - begin}


def medians(starts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {phase: median(seconds[phase] for seconds in starts) for phase in (*PHASES, "total")}


def line_of(name: str, seconds: dict[str, float]) -> str:
    return f"{name:<16} " + "  ".join(f"{phase} {value:.2f} s" for phase, value in seconds.items())


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description="Time from the command to the first step. Other options are passed to train.py."
    )
    add = parser.add_argument
    add("--compile", action="store_true", help="compiled starts: with an empty cache, and again")
    add("--turns", type=int, default=3, help="starts, or pairs of compiled starts; medians count (default: 3)")
    add("--out", type=Path, help="the JSON (default: benchmarks/results/start_time_<eager or compiled>.json)")
    args, flags = parser.parse_known_args(argv)
    mode = "compiled" if args.compile else "eager"
    if not any(flag.startswith("--job.config_file") for flag in flags):
        flags = ["--job.config_file=quickstart.toml", *flags]
    flags += ["--training.compile"] if args.compile else []

    import torch
    from step_time import RESULTS, environment  # imports torch, which a started process does itself

    from torchditan.run.atomic_files import write_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = shlex.join(["python", "benchmarks/start_time.py", *argv])
    head = {"benchmark": "start_time", "command": command, **environment(device)}
    starts: dict[str, list[dict[str, float]]] = {
        name: [] for name in (("first", "second") if args.compile else ("start",))
    }
    for _ in range(args.turns):
        with tempfile.TemporaryDirectory() as cache:
            for name, found in starts.items():
                found.append(measure(flags, cache=Path(cache) if args.compile else None))
                print(line_of(name, found[-1]), flush=True)
    middle = {name: medians(found) for name, found in starts.items()}
    for name, seconds in middle.items():
        print(line_of(f"median, {name}", seconds))
    result = middle["start"]["total"] if not args.compile else middle["second"]["total"] / middle["first"]["total"]
    print(f"{'second / first' if args.compile else 'total'}: {result:.2f} (target: at most {TARGETS[mode]})")
    out = args.out or RESULTS / f"start_time_{mode}.json"
    document = {
        **head,
        "flags": flags,
        "starts_s": starts,
        "medians_s": middle,
        "result": result,
        "target": TARGETS[mode],
    }

    write_file(out, (json.dumps(document, indent=1) + "\n").encode())
    print(f"wrote {out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        report = Path(sys.argv[2])
        report.write_text(json.dumps(start(sys.argv[3:])))
        os._exit(0)  # nothing of an unfinished run is worth closing
    main(sys.argv[1:])
