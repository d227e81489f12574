#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The cost of saving, compared with `torch.save` of the same state: `python benchmarks/checkpoint_cost.py`.

Notable:
- the trainer builds the model, its optimizer and its average, and trains between the saves, on random samples;
- "disabled" is a synchronous save: files, fsync, rename. "async" measures how long training
  waits (the stall) and how long the background write takes. The first stall, which allocates the memory of the copy, is
  listed separately;
- the variants run in turns, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from trainer_step import build_trainer

from torchditan.checkpoint.files import list_checkpoints
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.config.loader import load_config
from torchditan.config.options import Config
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.trainer import Trainer

TARGETS = {"cpu": 0.25, "cuda": 0.1}
"""Maximum stall of an asynchronous save after the first, as a fraction of a synchronous save."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="The cost of saving, compared with torch.save of the same state. Takes options of train.py too.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="turns of each variant; their median counts")
    add("--steps", type=int, default=2, help="steps trained between two saves")
    add("--async_mode", default=None, help="async, or async_with_pinned_mem (default: on a GPU)")
    add("--folder", type=Path, help="folder for temporary checkpoints (default: the system's)")
    add("--out", type=Path, help="JSON to write, such as benchmarks/results/checkpoint_cost_cpu.json (default: none)")
    return parser.parse_known_args(argv)


def job(folder: Path, flags: list[str], *, async_mode: str) -> Config:
    """DiT-S/2 on random latents of 4 x 32 x 32, unless flags change it."""
    return load_config(
        [
            "--checkpoint.enable_checkpoint",
            "--model.flavor=DiT-S",
            "--model.patch_size=2",
            "--model.input_channels=4",
            "--dataset.dataset_name=dummy",
            "--dataset.image_size=32",
            "--dataset.num_classes=1000",
            "--dataset.num_workers=0",
            "--training.batch_size=4",
            "--training.mixed_precision_param=float32",
            "--metrics.enable_sampling=false",
            "--metrics.experiment_name=run",
            "--checkpoint.keep_latest_k=1",
            f"--checkpoint.async_mode={async_mode}",
            f"--job.dump_folder={folder}",
            *flags,
        ]
    )


def manager(trainer: Trainer, name: str, *, async_mode: str) -> CheckpointManager:
    return CheckpointManager(
        trainer.job.run_directory.path / name,
        trainer.run_state(),
        config=trainer.config.replace({"checkpoint.async_mode": async_mode}),
        trajectory=trainer.job.trajectory,
        timeout_seconds=600,
    )


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def save_plainly(state: dict[str, Any], file: Path, *, sync: bool) -> None:
    with file.open("wb") as stream:
        torch.save(state, stream)
        if sync:
            stream.flush()
            os.fsync(stream.fileno())


def measure(trainer: Trainer, args: argparse.Namespace, *, async_mode: str) -> dict[str, Any]:
    batches = trainer.open_stream()
    between = manager(trainer, "between", async_mode="disabled")
    beside = manager(trainer, "beside", async_mode=async_mode)
    file = trainer.job.run_directory.path / "state.pt"

    def train() -> float:
        """Seconds per step."""
        spent = seconds(lambda: [trainer.train_step(batches) for _ in range(args.steps)])
        if trainer.device.type == "cuda":
            spent += seconds(torch.cuda.synchronize)
        return spent / args.steps

    def write_beside(spent: dict[str, list[float]]) -> float:
        """Seconds for which training waits."""
        stall = seconds(lambda: beside.save())
        spent["step while it is written"].append(train())
        beside.wait()
        assert beside.write_s is not None and beside.failure is None
        spent["async: the write beside"].append(beside.write_s)
        return stall

    train()
    spent: dict[str, list[float]] = {"async: the write beside": [], "step while it is written": []}
    first_stall = write_beside(spent)
    variants: dict[str, Callable[[], float]] = {
        "step": train,
        "torch.save": lambda: seconds(lambda: save_plainly(between.state.tensor_states(), file, sync=False)),
        "torch.save and fsync": lambda: seconds(lambda: save_plainly(between.state.tensor_states(), file, sync=True)),
        "disabled": lambda: seconds(lambda: between.save()),
        "async: the stall": lambda: write_beside(spent),
        "load": lambda: seconds(between.load_latest),
    }
    for _ in range(args.rounds):
        for name, variant in variants.items():
            spent.setdefault(name, []).append(variant())
            train()
    for checkpoints in (between, beside):
        checkpoints.close()
    checkpoint = list_checkpoints(between.folder)[-1]
    medians = {name: statistics.median(times) for name, times in spent.items()}
    return {
        "state_gib": sum(path.stat().st_size for path in checkpoint.iterdir()) / 1024**3,
        "first_stall_s": first_stall,
        "first_stall_of_disabled": first_stall / medians["disabled"],
        "stall_of_disabled": medians["async: the stall"] / medians["disabled"],
        "stall_of_step": medians["async: the stall"] / medians["step"],
        "disabled_of_torch_save": medians["disabled"] / medians["torch.save"],
        "disabled_of_torch_save_and_fsync": medians["disabled"] / medians["torch.save and fsync"],
        "medians_s": medians,
        "rounds_s": spent,
    }


def main() -> None:
    args, flags = parse(sys.argv[1:])
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        trainer = build_trainer(job(Path(folder), flags, async_mode="disabled"))
        device = trainer.device.type
        async_mode = args.async_mode or ("async" if device == "cpu" else "async_with_pinned_mem")
        result = measure(trainer, args, async_mode=async_mode)
        trainer.job.run_directory.close()
        dist.destroy_process_group()
    for name, median in result["medians_s"].items():
        print(f"{name:<26} {median:8.3f} s   {median / result['medians_s']['disabled']:6.2f} of a synchronous save")
    print(
        f"a state of {result['state_gib']:.2f} GiB; {async_mode}: first stall {result['first_stall_s']:.3f} s "
        f"({result['first_stall_of_disabled']:.2f} of a synchronous save), then {result['stall_of_disabled']:.2f} "
        f"(target {TARGETS[device]}); load before the start: {load:.2f}"
    )
    if args.out is not None:
        content = {
            "command": sys.argv,
            "async_mode": async_mode,
            "target": TARGETS[device],
            **result,
            "load_before": load,
            "versions": provenance.versions("torch"),
            "git_commit": provenance.git_commit(),
            "hardware": provenance.hardware(device, 1),
        }
        write_file(args.out, (json.dumps(content, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
