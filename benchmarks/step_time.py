#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Time, throughput and memory of one training step: `python benchmarks/step_time.py`.

Notable:
- on a CPU: our DiT against diffusers' `DiTTransformer2DModel` of the same shape, forward + backward + fused AdamW,
  in turns; the median counts;
- on a GPU: the trainer's whole step (objective, clipping, non-finite guard, EMA), one process per model, swept over
  batch sizes until memory runs out;
- step_cases.py defines the cases and step_measure.py the measurements. This file has the command line, the ratios, the
  table and the JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from step_cases import CPU_VARIANTS, GPU_BATCH_SIZES, SAMPLE_SHAPES, cpu_cases, gpu_cases
from step_measure import OUT_OF_TIME, Row, new_row, one_process, sweep_in_subprocess, take_turns

from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

TARGETS = {"fp32_eager": 0.96, "bf16_compiled": 0.42}
"""Maximum time of our variant for DiT-S, as a multiple of diffusers in fp32 eager."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time, throughput and memory of one training step, against diffusers on a CPU, swept over models "
        "and batch sizes on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu", help="where to measure")
    add(
        "--against",
        choices=["diffusers", "none"],
        help="implementation to compare with (default: diffusers on a CPU, else none)",
    )
    add("--size", choices=["full", "debug"], default="full", help="debug: a tiny model, to check that it runs")
    add("--models", nargs="+", choices=list(SAMPLE_SHAPES), help="flavors (default: DiT-S, or XL, L and 7B on a GPU)")
    add("--variants", nargs="+", choices=CPU_VARIANTS, help="on a CPU: what to compare (default: all)")
    add("--batch_size", type=int, nargs="+", help="images per step (default: 16; on a GPU a sweep)")
    add("--repeats", type=int, default=7, help="measured steps per case; their median counts")
    add("--warmup", type=int, default=2, help="steps before, including compilation")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--time_limit", type=float, default=420, help="seconds: of a GPU sweep, or of each memory process")
    add("--no_memory", dest="memory", action="store_false", help="on a CPU: skip the processes that measure memory")
    add("--out", type=Path, help="the JSON (default: benchmarks/results/step_time_<device>.json)")
    args = parser.parse_args(argv)

    if args.device == "cuda" and not cuda:
        parser.error("--device cuda: this machine has no CUDA device; use --device cpu")
    if min(args.repeats, args.warmup, *(args.batch_size or [1])) < 1:
        parser.error("--repeats, --warmup and --batch_size must be at least 1")
    if args.device == "cuda" and (args.variants or not args.memory):
        parser.error("--variants and --no_memory are for a CPU; on a GPU choose --models and --batch_size")
    if args.device == "cpu" and len(args.batch_size or [1]) > 1:
        parser.error("--batch_size: one size on a CPU; several are for the sweep on a GPU")
    args.variants = args.variants or list(CPU_VARIANTS)
    args.against = args.against or ("diffusers" if args.device == "cpu" else "none")
    if args.against == "diffusers" and importlib.util.find_spec("diffusers") is None:
        parser.error("--against diffusers: it is not installed; pip install -e '.[benchmark]', or --against none")
    if args.size == "debug":
        args.models = args.models or ["debugmodel"]
    args.models = args.models or (["DiT-S"] if args.device == "cpu" else ["DiT-XL", "DiT-L", "DiT-7B"])
    if args.device == "cpu":
        args.batch_size = args.batch_size or [2 if args.size == "debug" else 16]
    return args


def environment(device: str) -> dict[str, Any]:
    return {
        "device": device,
        "device_name": provenance.device_name(device),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "versions": {**provenance.versions("torch", "diffusers", "numpy"), "cuda": torch.version.cuda},
        "git_commit": provenance.git_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def measure_cpu(args: argparse.Namespace, head: dict[str, Any], out: Path) -> list[Row]:
    """Memory of each case in a separate process, then the time of all cases in this one."""
    device = torch.device("cpu")
    options: dict[str, Any] = {"repeats": args.repeats, "warmup": args.warmup, "device": device}
    rows: list[Row] = []
    for model in args.models:
        cases = cpu_cases(model, against=args.against, variants=args.variants)
        memory: list[Row] = []
        for case in cases if args.memory else []:
            print(f"memory of {case.title}", flush=True)
            deadline = time.time() + args.time_limit
            memory += sweep_in_subprocess(case, args.batch_size, repeats=1, warmup=1, deadline=deadline, device=device)
        with one_process():
            timed = take_turns(cases, batch_size=args.batch_size[0], **options)
        for row, of_its_own in zip(timed, memory, strict=args.memory):
            for key in ("peak_memory_gib", "peak_memory_growth_gib"):
                row[key] = of_its_own[key]
        rows += timed
        write_results(out, head, rows)
    return rows


def measure_gpu(args: argparse.Namespace, head: dict[str, Any], out: Path) -> list[Row]:
    """Every case in a separate process, until the time limit. The file is written after every row."""
    deadline = time.time() + args.time_limit
    options: dict[str, Any] = {"repeats": args.repeats, "warmup": args.warmup, "device": torch.device("cuda")}
    rows: list[Row] = []
    print(table([]), flush=True)
    for case in gpu_cases(args.models, against=args.against):
        batch_sizes = args.batch_size or GPU_BATCH_SIZES[case.model]
        if time.time() > deadline:
            found = iter([new_row(case, batch_sizes[0]) | OUT_OF_TIME])
        else:
            found = sweep_in_subprocess(case, batch_sizes, deadline=deadline, **options)
        for row in found:
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
            write_results(out, head, rows)
    return rows


def ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each of our variants relative to diffusers in fp32 eager (the targets), and in the same variant."""
    fastest: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row["status"] == "ok":
            variant = f"{row['precision']}_{'eager' if row['compile'] == 'eager' else 'compiled'}"
            key = (row["model"], row["implementation"], variant)
            fastest[key] = min(row["step_time_s"], fastest.get(key, float("inf")))
    return [
        {
            "model": model,
            "numerator": f"ours {variant}",
            "denominator": f"diffusers {other}",
            "ratio": seconds / fastest[model, "diffusers", other],
            "target": TARGETS.get(variant) if (model, other) == ("DiT-S", "fp32_eager") else None,
        }
        for (model, implementation, variant), seconds in fastest.items()
        for other in dict.fromkeys(["fp32_eager", variant])
        if implementation == "ours" and (model, "diffusers", other) in fastest
    ]


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("implementation", "", "<14"),
    ("model", "", "<10"),
    ("preset", "", "<10"),
    ("precision", "", "<9"),
    ("compile", "", "<11"),
    ("activation_checkpoint", "ac", "<4"),
    ("batch_size", "batch", ">5"),
    ("step_time_s", "step s", ">8.4f"),
    ("interquartile_range_s", "iqr s", ">8.4f"),
    ("images_per_second", "images/s", ">9.2f"),
    ("mfu", "mfu %", ">6.1f"),
    ("peak_memory_gib", "peak GiB", ">8.2f"),
    ("peak_memory_growth_gib", "grown", ">7.2f"),
    ("peak_reserved_gib", "reserved", ">8.2f"),
)


def table(rows: Sequence[Row]) -> str:
    def cell(value: Any, layout: str) -> str:
        return format("-" if value is None else value, layout.split(".")[0] if value is None else layout)

    lines = ["  ".join(cell(title or key, layout.split(".")[0]) for key, title, layout in COLUMNS)]
    for row in rows:
        line = "  ".join(cell(row[key], layout) for key, _, layout in COLUMNS)
        lines.append(line if row["status"] == "ok" else f"{line}  {row['status']}: {row['reason'][:60]}")
    return "\n".join(lines)


def write_results(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    document = {**head, "rows": list(rows), "ratios": ratios(rows) if head["device"] == "cpu" else []}
    write_file(path, (json.dumps(document, indent=1) + "\n").encode())


def main(argv: Sequence[str]) -> int:
    """Return the exit code: 0 if every row was measured or ran out of memory, 1 if one failed otherwise."""
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    head = {
        "benchmark": "step_time",
        "command": "python benchmarks/step_time.py " + shlex.join(argv),
        "repeats": args.repeats,
        "warmup": args.warmup,
        **environment(args.device),
    }
    name = "cpu" if args.device == "cpu" else re.sub(r"[^a-z0-9]+", "-", head["device_name"].lower())
    out = args.out or Path(__file__).resolve().parent / "results" / f"step_time_{name}.json"
    if head["load_average_before"] > 0.5:
        print(f"load average {head['load_average_before']}: other work on this machine affects the results")

    rows = (measure_cpu if args.device == "cpu" else measure_gpu)(args, head, out)
    print(f"\n{head['device_name']}, {head['threads']} threads, torch {head['versions']['torch']}")
    print(table(rows))
    for entry in ratios(rows) if args.device == "cpu" else []:
        target = "" if entry["target"] is None else f" (target: at most {entry['target']})"
        print(f"{entry['model']}: {entry['numerator']} / {entry['denominator']}: {entry['ratio']:.3f}{target}")
    print(f"wrote {out}")
    return 1 if any(row["status"] == "error" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
