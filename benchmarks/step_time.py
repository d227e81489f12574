#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Time of a training step and of drawing images, of ours and of others: `python benchmarks/step_time.py`.

Notable:
- ours is the trainer's whole step. The others are diffusers' `DiTTransformer2DModel` and a DiT in plain PyTorch
  (plain_dit.py), both in a loop as research repositories write it;
- two models at a time, in new processes; blocks of steps take turns, and medians count;
- step_cases.py defines the suites and step_measure.py the measurements. This file has the command line, the table and
  the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

import step_measure
import torch
from step_cases import SAMPLE_SHAPES, SUITES, VARIANTS, Choice, Group, build_groups
from step_measure import Row, Settings, missing_rows, ratio_of

from torchditan.distributed.cpu_threads import limit_spinning
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

RESULTS = Path(__file__).resolve().parent / "results"
CPU_SUITES = ("diffusers", "plain", "sampling", "trainer", "float32_products")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description="Time of a training step and of drawing images, of ours, diffusers and plain PyTorch."
    )
    add = parser.add_argument
    add(
        "suites",
        nargs="*",
        metavar="suite",
        help=f"{', '.join(SUITES)} (default: all but options; float8 and sweep on a GPU)",
    )
    add(
        "--flags",
        type=shlex.split,
        default=[],
        help="options of train.py, for the suite options",
    )
    add(
        "--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu", help="where to measure (default: a GPU)"
    )
    add("--models", nargs="+", choices=list(SAMPLE_SHAPES), help="flavors (default: DiT-S; on a GPU, by suite)")
    add("--variants", nargs="+", choices=VARIANTS, help="precisions and modes (default: all; those of bf16 on a GPU)")
    add("--ranks", type=int, nargs="+", help="numbers of processes (default: 1 and 2; 1 on a GPU)")
    add("--batch_size", type=int, nargs="+", help="images of a step over all ranks (default: by suite)")
    add("--turns", type=int, help="blocks of each case (default: 7; 8 of sampling, which draws 256 images)")
    add("--steps", type=int, help="steps in a block (default: 1; on a GPU 10 of training)")
    add("--warmup", type=int, help="steps of each case before, with compilation (default: 2; GPU: 5; sampling: 1)")
    add(
        "--sampling_steps",
        type=int,
        help="solver steps of a drawn image (default: 1; 50 on a GPU)",
    )
    add("--threads", type=int, help="CPU threads of each rank (default: its share of the cores)")
    add("--time_limit", type=float, default=math.inf, help="seconds: then starts nothing, and a minute later ends all")
    add("--quick", action="store_true", help="a tiny model for seconds, to check that it runs")
    add("--out", type=Path, help="the JSON (default: benchmarks/results/step_time_<device>.json)")
    args = parser.parse_args(argv)

    if unknown := [suite for suite in args.suites if suite not in SUITES]:
        parser.error(f"suite {unknown[0]}: must be one of {', '.join(SUITES)}")
    if ("options" in args.suites) != bool(args.flags):
        parser.error("--flags: the suite options, and only that one, needs it, such as --flags=--training.compile")
    if args.device == "cuda" and not cuda:
        parser.error("--device cuda: this machine has no CUDA device; use --device cpu")
    counts = (args.turns, args.steps, args.warmup, args.sampling_steps, args.threads, *(args.ranks or []))
    if any(count is not None and count < 1 for count in counts):
        parser.error("--turns, --steps, --warmup, --sampling_steps, --threads and --ranks must be at least 1")
    on_cpu = args.device == "cpu"
    args.sampling_steps = args.sampling_steps or (1 if on_cpu else 50)
    args.suites = args.suites or (list(CPU_SUITES) if on_cpu else [suite for suite in SUITES if suite != "options"])
    if args.quick:
        args.models, args.turns, args.steps, args.warmup = ["debugmodel"], 3, 1, 1
        args.batch_size = args.batch_size or [2]
        args.variants, args.ranks = args.variants or ["fp32_eager"], args.ranks or [1]
    args.variants = args.variants or list(VARIANTS if on_cpu else VARIANTS[2:])
    args.ranks = args.ranks or ([1, 2] if on_cpu else [1])
    if uneven := [size for size in args.batch_size or [] for ranks in args.ranks if size < 1 or size % ranks]:
        parser.error(f"--batch_size {uneven[0]}: must be a multiple of --ranks")
    if {"diffusers", "sampling"} & set(args.suites) and importlib.util.find_spec("diffusers") is None:
        parser.error("suite diffusers: it is not installed; pip install -e '.[benchmark]', or name other suites")
    return args


def environment(device: str) -> dict[str, Any]:
    return {
        "device": device,
        "device_name": provenance.device_name(device),
        "cpu_name": provenance.cpu_name(),
        "cpu_count": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "versions": {**provenance.versions("torch", "diffusers", "torchao", "numpy"), "cuda": torch.version.cuda},
        "git_commit": provenance.git_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def chosen_groups(args: argparse.Namespace) -> list[Group]:
    def of(suite: str) -> list[Group]:
        large = {"sweep": ["DiT-XL", "DiT-1B", "DiT-7B"], "float8": ["DiT-7B"]}.get(suite, ["DiT-XL"])
        models = args.models or (["DiT-S"] if args.device == "cpu" else large)
        sizes = None if args.batch_size is None else tuple(args.batch_size)
        device = torch.device(args.device)
        choice = Choice(device, tuple(models), tuple(args.variants), tuple(args.ranks), sizes, tuple(args.flags))
        return build_groups([suite], choice)

    return [group for suite in args.suites for group in of(suite)]


def settings_of(group: Group, args: argparse.Namespace) -> Settings:
    turns, steps, warmup = (7, 1, 2) if args.device == "cpu" else (7, 10, 5)
    if group.suite == "sampling":
        turns, steps, warmup = 8, 1, 1
    return Settings(args.turns or turns, args.steps or steps, args.warmup or warmup, args.sampling_steps)


def measure_groups(args: argparse.Namespace, head: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Measure group after group. The file is written after each."""
    deadline = time.monotonic() + args.time_limit
    results: list[dict[str, Any]] = []
    too_large: set[Any] = set()  # cases of the sweep that ran out of memory, or failed
    for group in chosen_groups(args):
        if too_large & set(group.cases):
            continue
        seconds_left = deadline - time.monotonic()
        print(f"\n{title_of(group)}", flush=True)
        if group.missing is not None:
            rows = missing_rows(group, group.missing)
        elif seconds_left < 0:
            rows = missing_rows(group, "the time limit was reached", status="skipped")
        else:
            rows = step_measure.measure_in_processes(group, settings_of(group, args), seconds_left=seconds_left + 60)
        if any(row["status"] != "ok" for row in rows):
            too_large |= set(group.cases) if group.suite == "sweep" else set()
        results.append({**result_of(group, rows), "settings": dataclasses.asdict(settings_of(group, args))})
        print(table(results[-1]), flush=True)
        write_file(out, (json.dumps({**head, "groups": results}, indent=1) + "\n").encode())
    return results


def result_of(group: Group, rows: list[Row]) -> dict[str, Any]:
    result: dict[str, Any] = {"suite": group.suite, "rows": rows, "comparison": None}
    if len(rows) == 2 and all(row["status"] == "ok" for row in rows):
        result["comparison"] = {**ratio_of(*(row["blocks_s"] for row in rows)), "target": group.target}
    return result


def title_of(group: Group) -> str:
    case = group.cases[0]
    work = "drawing images" if case.work == "sample" else "a training step"
    model = case.model if case.depth is None else f"{case.model} with {case.depth} blocks"
    processes = "1 process" if group.num_ranks == 1 else f"{group.num_ranks} processes"
    return f"{group.suite}: {work}, {model}, batch {group.batch_size}, {processes}"


def table(result: dict[str, Any]) -> str:
    """One line for each case, and the ratio of two."""
    lines = [line_of(row) for row in result["rows"]]
    if found := result["comparison"]:
        first, second = (row["implementation"] for row in result["rows"])
        target = "" if found["target"] is None else f"; target: at most {found['target']}"
        low, high = found["quartiles"]
        shown = f"not reported: spread {found['spread']:.0%}"
        if found["ratio"] is not None:
            shown = f"{found['ratio']:.3f} (quartiles {low:.3f} and {high:.3f})"
        lines.append(f"  {first} / {second}: {shown}{target}")
    return "\n".join(lines)


def line_of(row: Row) -> str:
    mode = "compiled" if row["compiled"] else "eager"
    flags = " ".join(flag.removeprefix("--") for flag in row["flags"])
    text = f"  {row['implementation']:<9}  {row['preset']:<10}  {row['precision']} {mode:<8}  {flags}".rstrip()
    if row["status"] != "ok":
        return f"{text}  {row['status']}: {row['reason'][:80]}"
    low, high = row["quartiles_s"]
    text += f"  {row['step_time_s']:.4f} s ({low:.4f} to {high:.4f})  {row['images_per_second']:.2f} images/s"
    if row["mfu"] is not None:
        text += f"  MFU {row['mfu']:.1f}%"
    if row["peak_memory_gib"] is not None:
        text += f"  {row['peak_memory_gib']:.2f} GiB"
    return text


def main(argv: Sequence[str]) -> int:
    """Return the exit code: 0 if every row was measured, ran out of memory or cannot be measured here, else 1."""
    args = parse(argv)
    limit_spinning()  # as train.py does; this and what follows apply to the new processes
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    head = {
        "benchmark": "step_time",
        "command": shlex.join(["python", "benchmarks/step_time.py", *argv]),
        "sampling_steps": args.sampling_steps,
        **environment(args.device),
    }
    name = "cpu" if args.device == "cpu" else re.sub(r"[^a-z0-9]+", "-", head["device_name"].lower())
    out = args.out or RESULTS / f"step_time_{name}.json"
    print(f"{head['device_name']}, torch {head['versions']['torch']}")
    if head["load_average_before"] > 0.5:
        print(f"load average {head['load_average_before']}: other work on this machine affects the results")
    results = measure_groups(args, head, out)
    print(f"\nwrote {out}")
    return 1 if any(row["status"] == "error" for result in results for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
