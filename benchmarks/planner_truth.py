#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The planner against one GPU: planned and measured peak memory, and the lower bound of the time against a real step.

Notable:
- every cell runs in a separate process, on random normal data and weights. Cells that do not fit according to the plan
  are skipped. Cells that run out of memory record the reason;
- measured: the allocator's peak in 5 steps after two others, and their mean time;
- compiled cells are measured too and reported separately, because the planner plans them as eager cells.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from step_cases import NUM_CLASSES, PATCH_SIZE, SAMPLE_SHAPES
from step_measure import GIB, process_group, time_block
from trainer_step import build_trainer, fill_with_normal, trainer_step

from torchditan.config.loader import build_config
from torchditan.config.options import Config
from torchditan.distributed.process_group import Rank
from torchditan.errors import ConfigError
from torchditan.extras.ablation.launch import Job, execute
from torchditan.extras.planner.devices import device_named
from torchditan.extras.planner.plan import plan_run
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

Row = dict[str, Any]
MODES = ("none", "full", "2", "op")
BATCH_SIZES = {"debugmodel": (2,), "DiT-L": (16, 64, 128), "DiT-7B": (1, 4, 16)}
WARMUP, STEPS = 2, 5


@dataclass(frozen=True)
class Cell:
    flavor: str
    checkpointing: str
    """none, full, op, or n for every n-th block."""
    batch_size: int
    compiled: bool = False

    def config(self) -> Config:
        mode = self.checkpointing if self.checkpointing in ("none", "full") else "selective"
        channels, height, width = SAMPLE_SHAPES[self.flavor]
        values: dict[str, Any] = {
            "model.flavor": self.flavor,
            "model.patch_size": PATCH_SIZE,
            "model.input_channels": channels,
            "dataset.dataset_name": "dummy",
            "dataset.image_size": [height, width],
            "dataset.num_classes": NUM_CLASSES,
            "training.batch_size": self.batch_size,
            "training.compile": self.compiled,
            "activation_checkpoint.mode": mode,
            # float32 weights, gradients, moments and an average of 7B parameters do not fit on one GPU
            "ema.enable": self.flavor != "DiT-7B",
        }
        if mode == "selective":
            values["activation_checkpoint.selective_ac_option"] = self.checkpointing
        return build_config(values)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Planned and measured peak memory, and lower bound and measured time of a step, on one GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only times, to check that it runs")
    add("--models", nargs="+", choices=list(BATCH_SIZES), default=["DiT-L", "DiT-7B"], help="flavors")
    add("--no_compiled", dest="compiled", action="store_false", help="eager cells only")
    add("--cell_timeout", type=float, default=240, help="time limit of a cell in seconds")
    add(
        "--out",
        type=Path,
        help="the JSON (default: benchmarks/results/planner_truth_<device>.json); the table is the .md file next to it",
    )
    add("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device")
    if args.out is None:
        args.out = Path(__file__).resolve().parent / "results" / f"planner_truth_{args.device}.json"
    return args


def cells(models: Sequence[str], *, compiled: bool) -> list[Cell]:
    """All checkpointing modes at all batch sizes in eager mode, then the middle batch size compiled."""
    eager = [Cell(flavor, mode, size) for flavor in models for mode in MODES for size in BATCH_SIZES[flavor]]
    if not compiled:
        return eager
    middle = {flavor: BATCH_SIZES[flavor][len(BATCH_SIZES[flavor]) // 2] for flavor in models}
    return eager + [Cell(flavor, mode, middle[flavor], True) for flavor, mode in itertools.product(models, MODES)]


def measure(cell: Cell, device: torch.device) -> Row:
    """Peak memory in GiB (None on a CPU) and seconds of the trainer's step, in this process."""
    with process_group(Rank.from_environment()), tempfile.TemporaryDirectory() as folder:
        place = {"job.dump_folder": folder, "metrics.experiment_name": "cell", "metrics.enable_sampling": False}
        trainer = build_trainer(cell.config().replace({**place, "training.steps": 1000}))
        fill_with_normal(trainer.model)
        step = trainer_step(trainer)
        try:
            time_block(step, steps=WARMUP, device=device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = time_block(step, steps=STEPS, device=device)
            peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
        finally:
            step.close()
    return {"measured_gib": peak, "measured_s": seconds}


def compare(cell: Cell, *, device: str, device_name: str | None, timeout: float) -> Row:
    """The row of a cell: its plan, then its measurement in a separate process."""
    plan = plan_run(cell.config(), device=device_name or ("cpu" if device == "cpu" else None), num_devices=1)
    row: Row = {
        **dataclasses.asdict(cell),
        "planned_gib": plan.peak_memory_gib,
        "at_least_s": plan.min_step_time_s,
        "peak_at": plan.peak.label,
        "status": "ok",
        "reason": None,
        "measured_gib": None,
        "measured_s": None,
        "memory_error": None,
    }
    if plan.fits is False:
        return {**row, "status": "skipped", "reason": "planned not to fit"}
    program = (__file__, "--device", device, "--cell", json.dumps(dataclasses.asdict(cell)))
    with tempfile.TemporaryDirectory() as folder:
        outcome = execute(Job(program, Path(folder), timeout_s=timeout))
    if outcome.status != "completed":
        reason = str(outcome.reason)
        return {**row, "status": "oom" if "OutOfMemory" in reason else outcome.status, "reason": reason[:300]}
    row.update(json.loads(outcome.log.splitlines()[-1]))
    if row["measured_gib"] is not None:
        row["memory_error"] = row["planned_gib"] / row["measured_gib"] - 1
    return row


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| model | checkpointing | batch | blocks | planned GiB | measured GiB | difference | at least s "
        "| measured s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        blocks = "compiled" if row["compiled"] else "eager"
        memory = [_number(row["planned_gib"], ".2f"), _number(row["measured_gib"], ".2f")]
        memory.append(_number(row["memory_error"], "+.1%") or row["reason"] or "not measured")
        seconds = [_number(row[key], spec) for key, spec in (("at_least_s", ".4f"), ("measured_s", ".4f"))]
        cells = [
            f"{row['flavor']}/{PATCH_SIZE}",
            row["checkpointing"],
            str(row["batch_size"]),
            blocks,
            *memory,
            *seconds,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def main() -> None:
    args = parse(sys.argv[1:])
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = torch.device(args.device)
    if args.cell:
        print(json.dumps(measure(Cell(**json.loads(args.cell)), device)))
        return
    name = torch.cuda.get_device_name() if args.device == "cuda" else None
    try:
        known = device_named(name).name if name else None
    except ConfigError as error:
        print(f"no lower bounds of the time: {error}")
        known = None
    rows: list[Row] = []
    for cell in cells(args.models, compiled=args.compiled):
        row = compare(cell, device=args.device, device_name=known, timeout=args.cell_timeout)
        rows.append(row)
        print(markdown([row]).splitlines()[-1], flush=True)
        content = {
            "command": shlex.join(["python", *sys.argv]),
            "device": name or "cpu",
            "versions": provenance.versions("torch", "torchditan"),
            "git_commit": provenance.git_commit(),
            "rows": rows,
        }
        write_file(args.out, (json.dumps(content, indent=1) + "\n").encode())
        write_file(args.out.with_suffix(".md"), markdown(rows).encode())
    print(f"{args.out}, and the table next to it")


if __name__ == "__main__":
    main()
