# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Measurements of step_time.py: the cases of a group take turns in new processes.

Notable:
- at most two models share a process: more make a machine reclaim memory, which multiplies the time of a step;
- the cases run blocks of steps in turns, A B A B, so that a drift of the machine affects both. A ratio is the median of
  the ratios of the turns. It is not reported if their interquartile range exceeds a fifth of it;
- a crash or a hang ends only one group. A row that fails or runs out of memory records the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import multiprocessing
import os
import re
import socket
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from step_cases import PATCH_SIZE, SAMPLE_SHAPES, Case, Group, build_spec, build_step
from trainer_step import Step

from torchditan.distributed.cpu_threads import configure_cpu
from torchditan.distributed.process_group import Rank, from_rank_0, init_process_group
from torchditan.models.flops import ModelFlops, count_model_flops
from torchditan.models.peak_flops import peak_flops
from torchditan.supervision.exit_status import verdict_of
from torchditan.supervision.parent_death import die_with_parent

GIB = 1024**3
MOST_SPREAD = 0.2
"""Largest interquartile range of a ratio, relative to its median, with which it is reported."""
START_METHOD = "spawn"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    turns: int
    """Blocks of each case."""
    steps: int
    """Steps in a block."""
    warmup: int
    """Steps of each case before, with compilation."""
    sampling_steps: int
    """Solver steps of each drawn image."""


def new_row(case: Case, group: Group) -> Row:
    """The record of one measurement, without results."""
    return {
        **dataclasses.asdict(case),
        "patch_size": PATCH_SIZE,
        "sample_shape": list(SAMPLE_SHAPES[case.model]),
        "batch_size": group.batch_size,
        "num_ranks": group.num_ranks,
        "threads": torch.get_num_threads(),
        "status": "ok",
        "reason": None,
        "num_parameters": None,
        "blocks_s": [],
        "step_time_s": None,
        "quartiles_s": None,
        "images_per_second": None,
        "tflops_per_device": None,
        "mfu": None,
        "peak_memory_gib": None,
        "peak_memory_growth_gib": None,
        "peak_reserved_gib": None,
    }


def missing_rows(group: Group, reason: str, *, status: str = "not measured") -> list[Row]:
    return [new_row(case, group) | {"status": status, "reason": reason} for case in group.cases]


def fail(row: Row, error: BaseException) -> None:
    verdict = verdict_of(error)
    row["status"], row["reason"] = verdict.status, verdict.reason[:500]
    if verdict.status != "oom":
        traceback.print_exception(error)


def quartiles(values: Sequence[float]) -> list[float]:
    first, third = np.percentile(values, [25, 75])
    return [float(first), float(third)]


@functools.cache
def model_flops(model: str, preset: str, depth: int | None) -> ModelFlops:
    return count_model_flops(build_spec(Case("ours", model, "fp32", preset=preset, depth=depth)))


def flops_per_image(case: Case, *, sampling_steps: int) -> int:
    """Model FLOPs of a step, or of drawing with guidance, per image. The others count those of our model."""
    flops = model_flops(case.model, case.preset, case.depth)
    return flops.total if case.work == "train" else 2 * sampling_steps * flops.forward


def add_times(row: Row, times: Sequence[float], *, flops: int, peak: float | None) -> None:
    """The median of the blocks' seconds per step, and what follows from it."""
    median = float(np.median(times))
    flops_per_second = row["batch_size"] * flops / median / row["num_ranks"]
    row["blocks_s"] = [round(seconds, 6) for seconds in times]
    row["step_time_s"] = median
    row["quartiles_s"] = quartiles(times)
    row["images_per_second"] = row["batch_size"] / median
    row["tflops_per_device"] = flops_per_second / 1e12
    row["mfu"] = None if peak is None else 100 * flops_per_second / peak


def ratio_of(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of the ratios of the turns. `ratio` is None if they are too far apart."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    median, (low, high) = float(np.median(ratios)), quartiles(ratios)
    spread = (high - low) / median
    return {"ratio": median if spread <= MOST_SPREAD else None, "quartiles": [low, high], "spread": spread}


def add_memory(row: Row, resident_before: float | None, device: torch.device) -> None:
    """GPU: memory allocated and reserved by the allocator. CPU: resident memory, and its growth since the imports."""
    if device.type == "cuda":
        row["peak_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        return
    row["peak_memory_gib"] = resident_memory("VmHWM")
    if row["peak_memory_gib"] is not None and resident_before is not None:
        row["peak_memory_growth_gib"] = row["peak_memory_gib"] - resident_before


def resident_memory(key: str) -> float | None:
    """Resident memory of this process in GiB, now (VmRSS) or at its peak (VmHWM); None without /proc.

    Not getrusage, whose peak starts at that of the parent process.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = re.search(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE)
    assert line is not None
    return int(line[1]) * 1024 / GIB


def time_block(step: Step, *, steps: int, device: torch.device) -> float:
    """Seconds per step of consecutive steps. On a GPU the host runs ahead inside the block, as in training."""
    with step.settings():
        if dist.get_world_size() > 1:
            dist.barrier()
        wait_for(device)
        start = time.perf_counter()
        for _ in range(steps):
            step.run()
        wait_for(device)
        return (time.perf_counter() - start) / steps


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def process_group(rank: Rank) -> Any:
    """The trainer's process group and threads. Garbage is collected between turns only."""
    torch.manual_seed(rank.rank)
    configure_cpu()
    init_process_group(rank, timeout_seconds=600)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        dist.destroy_process_group()


def measure(group: Group, settings: Settings) -> list[Row]:
    """Measure the cases of a group on this rank. All ranks call it; the rows of rank 0 count."""
    rank = Rank.from_environment()
    device = rank.device
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    resident_before = resident_memory("VmRSS")
    steps: dict[Case, Step] = {}
    own = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # another rank may still close its run
    with process_group(rank), own, contextlib.ExitStack() as stack:
        folder = from_rank_0(own.name)  # a run has one folder
        rows = {case: new_row(case, group) for case in group.cases}  # after the number of threads is set
        for number, (case, row) in enumerate(rows.items()):
            try:
                step = build_step(
                    case,
                    batch_size=group.batch_size,
                    rank=rank,
                    folder=Path(folder) / str(number),
                    sampling_steps=settings.sampling_steps,
                )
                stack.callback(step.close)
                row["num_parameters"] = step.num_parameters
                time_block(step, steps=settings.warmup, device=device)
                steps[case] = step
            except Exception as error:
                fail(row, error)
            gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times: dict[Case, list[float]] = {case: [] for case in steps}
        try:
            for _ in range(settings.turns):
                for case, step in steps.items():
                    times[case].append(time_block(step, steps=settings.steps, device=device))
                gc.collect(1)  # as the trainer does between steps
        except Exception as error:
            fail(rows[case], error)
        for case, seconds in times.items():
            if rows[case]["status"] == "ok" and len(seconds) == settings.turns:
                flops = flops_per_image(case, sampling_steps=settings.sampling_steps)
                add_times(rows[case], seconds, flops=flops, peak=peak)
        if len(rows) == 1:
            add_memory(rows[group.cases[0]], resident_before, device)
    return list(rows.values())


def measure_in_processes(group: Group, settings: Settings, *, seconds_left: float) -> list[Row]:
    """`measure` on new processes, one for each rank. They are killed when the time is over."""
    context: Any = multiprocessing.get_context(START_METHOD)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        processes = [
            context.Process(target=_run_rank, args=(sender if i == 0 else None, environment, group, settings, log))
            for i, environment in enumerate(environments(group.num_ranks))
        ]
        for process in processes:
            process.start()
        sender.close()  # the pipe then ends with rank 0
        rows: list[Row] | None = None
        in_time = receiver.poll(None if math.isinf(seconds_left) else max(0.0, seconds_left))
        try:
            if in_time:
                with contextlib.suppress(EOFError):
                    rows = receiver.recv()
                for process in processes:
                    process.join(60)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if rows is None or any(row["status"] == "error" for row in rows):
            print("\n".join(log.read_text(errors="replace").splitlines()[-20:]), flush=True)
    if rows is not None:
        return rows
    codes = [process.exitcode for process in processes]
    why = f"the processes ended with exit codes {codes}" if in_time else "the time limit was reached"
    return missing_rows(group, why, status="error" if in_time else "skipped")


def environments(num_ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun would set for each rank; none for one process."""
    if num_ranks == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    return [{name: str(value) for name, value in variables.items()} for variables in ranks]


def _run_rank(
    sender: Connection | None, environment: dict[str, str], group: Group, settings: Settings, log: Path
) -> None:
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(environment)
    if any(case.implementation == "diffusers" for case in group.cases):  # before memory is read: it takes 100 MB
        import diffusers.models.transformers.dit_transformer_2d  # noqa: F401
    rows = measure(group, settings)
    if sender is not None:
        sender.send(rows)
