# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Measurements of step_time.py: cases in turns in one process, or one case at growing batch sizes in a new process.

Notable:
- `take_turns` runs one step of each case after another, A B A B, so that a drift of the machine affects all of them;
- `sweep_in_subprocess` gives a case separate memory, and a crash or a hang ends only this case;
- a row that fails or runs out of memory records the reason, and the others continue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_cases import PATCH_SIZE, SAMPLE_SHAPES, Batch, Case, Step, build_spec, build_step, make_batch

from torchditan.distributed.host_memory import keep_freed_memory
from torchditan.distributed.process_group import Rank, init_process_group
from torchditan.models.flops import count_model_flops
from torchditan.models.peak_flops import peak_flops
from torchditan.supervision.exit_status import verdict_of

GIB = 1024**3
OUT_OF_TIME = {"status": "skipped", "reason": "the time limit was reached"}

Row = dict[str, Any]


def new_row(case: Case, batch_size: int) -> Row:
    """The record of one measurement, without results."""
    return {
        **dataclasses.asdict(case),
        "patch_size": PATCH_SIZE,
        "sample_shape": list(SAMPLE_SHAPES[case.model]),
        "batch_size": batch_size,
        "status": "ok",
        "reason": None,
        "num_parameters": None,
        "step_times_s": [],
        "step_time_s": None,
        "interquartile_range_s": None,
        "images_per_second": None,
        "tflops_per_device": None,
        "mfu": None,
        "peak_memory_gib": None,
        "peak_memory_growth_gib": None,
        "peak_reserved_gib": None,
    }


def fail(row: Row, error: BaseException) -> None:
    verdict = verdict_of(error)
    row["status"], row["reason"] = verdict.status, verdict.reason[:500]
    if verdict.status != "oom":
        traceback.print_exception(error)


def add_times(row: Row, times: Sequence[float], *, flops_per_image: int, peak: float | None) -> None:
    median = float(np.median(times))
    flops_per_second = row["batch_size"] * flops_per_image / median
    row["step_times_s"] = [round(seconds, 6) for seconds in times]
    row["step_time_s"] = median
    row["interquartile_range_s"] = float(np.subtract(*np.percentile(times, [75, 25])))
    row["images_per_second"] = row["batch_size"] / median
    row["tflops_per_device"] = flops_per_second / 1e12
    row["mfu"] = None if peak is None else 100 * flops_per_second / peak


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


def time_steps(step: Step, batch: Batch, *, steps: int, device: torch.device) -> list[float]:
    """Seconds of each step. On a GPU by events between steps, because the host runs ahead as in training."""
    if device.type != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - start)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step(batch)
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """The trainer's process group with this process only, seeded. Garbage is collected manually."""
    torch.manual_seed(0)
    keep_freed_memory()
    init_process_group(Rank(rank=0, local_rank=0, world_size=1), timeout_seconds=600)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.distributed.destroy_process_group()


def take_turns(cases: Sequence[Case], *, batch_size: int, repeats: int, warmup: int, device: torch.device) -> list[Row]:
    """Time all cases in this process, one step of each in turn."""
    rows = {case: new_row(case, batch_size) for case in cases}
    batch = make_batch(build_spec(cases[0]), batch_size, device)
    steps: dict[Case, Step] = {}
    for case, row in rows.items():
        print(f"building and warming up {case.title}", flush=True)
        try:
            step, row["num_parameters"] = build_step(case, device)
            time_steps(step, batch, steps=warmup, device=device)
            steps[case] = step
        except Exception as error:
            fail(row, error)
        gc.collect()

    times: dict[Case, list[float]] = {case: [] for case in steps}
    for turn in range(repeats):
        for case, step in steps.items():
            times[case] += time_steps(step, batch, steps=1, device=device)
        last = "  ".join(f"{seconds[-1]:.3f}" for seconds in times.values())
        print(f"turn {turn + 1} of {repeats}, seconds: {last}", flush=True)
    for case, seconds in times.items():
        add_times(rows[case], seconds, flops_per_image=count_model_flops(build_spec(case)).total, peak=None)
    return list(rows.values())


def sweep(
    case: Case, batch_sizes: Sequence[int], *, repeats: int, warmup: int, deadline: float, device: torch.device
) -> Iterator[Row]:
    """One model, built once, at growing batch sizes until one fails or the time limit is reached."""
    # Every batch size gets new kernels, like a run with only this size.
    torch._dynamo.config.automatic_dynamic_shapes = False
    resident_before = resident_memory("VmRSS")
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    spec = build_spec(case)
    step: Step | None = None
    for batch_size in batch_sizes:
        row = new_row(case, batch_size)
        if time.time() > deadline:
            yield row | OUT_OF_TIME
            return
        try:
            if step is None:
                step, num_parameters = build_step(case, device)
            row["num_parameters"] = num_parameters
            batch = make_batch(spec, batch_size, device)
            time_steps(step, batch, steps=warmup, device=device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = time_steps(step, batch, steps=repeats, device=device)
            add_times(row, times, flops_per_image=count_model_flops(spec).total, peak=peak)
        except Exception as error:
            fail(row, error)
        add_memory(row, resident_before, device)
        yield row
        if row["status"] != "ok":
            return
        gc.collect()


def sweep_in_subprocess(
    case: Case, batch_sizes: Sequence[int], *, repeats: int, warmup: int, deadline: float, device: torch.device
) -> Iterator[Row]:
    """`sweep` in a new process. One that hangs past the deadline (such as a long compilation) gets another minute."""
    options = {"repeats": repeats, "warmup": warmup, "deadline": deadline, "device": device}
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send_rows, args=(sender, torch.get_num_threads(), case, batch_sizes, options))
    process.start()
    sender.close()  # the rows then end with the process

    def seconds_left() -> float:
        return max(0.0, deadline + 60 - time.time())

    open_sizes = list(batch_sizes)
    try:
        with contextlib.suppress(EOFError):
            while receiver.poll(seconds_left()):
                row = receiver.recv()
                open_sizes = open_sizes[1:] if row["status"] == "ok" else []
                yield row
        process.join(seconds_left())
    finally:
        process.kill()
        process.join()
    if open_sizes:
        row = new_row(case, open_sizes[0])
        row["status"], row["reason"] = "error", f"its process ended with exit code {process.exitcode}"
        yield row


def _send_rows(
    sender: Connection, num_threads: int, case: Case, batch_sizes: Sequence[int], options: dict[str, Any]
) -> None:
    torch.set_num_threads(num_threads)
    if case.implementation == "diffusers":  # before memory is read: the import takes 100 MB
        import diffusers.models.transformers.dit_transformer_2d  # noqa: F401
    with one_process():
        for row in sweep(case, batch_sizes, **options):
            sender.send(row)
