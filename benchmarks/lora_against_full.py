#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Time and memory of a LoRA compared with full fine-tuning: `python benchmarks/lora_against_full.py`.

Three launches of train.py on random data and weights, each in a separate process: all weights trained, a LoRA over a
bfloat16 base, a LoRA over an int8 base. The time of a step is the median without the first two steps. Memory is the
peak of the run: the allocator's on a GPU, the process's on a CPU, including libraries.
On a GPU: SD3-medium at 1024 px, batch 1, with activation checkpointing (about 60 GiB for full fine-tuning). On a CPU:
the tiny model, only to check that the benchmark runs. Options of train.py apply to all three.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.extras.ablation.launch import TRAIN, Job, execute
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_metrics

CASES = {
    "full": [],
    "lora, bfloat16 base": ["--lora.rank=16", "--quantize.base=bfloat16"],
    "lora, int8 base": ["--lora.rank=16", "--quantize.base=int8"],
}
SIZES = {
    "cuda": ["--model.flavor=SD3-medium", "--dataset.image_size=128"],  # latent cells of 1024 px
    "cpu": ["--model.flavor=debugmodel", "--dataset.image_size=16"],
}
SHARED = [
    "--model.name=sd3",
    "--model.input_channels=16",
    "--dataset.dataset_name=dummy",
    "--dataset.num_classes=0",
    "--dataset.num_workers=0",
    "--training.batch_size=1",
    "--activation_checkpoint.mode=full",
    "--ema.enable=false",
    "--metrics.log_freq=1",
    "--metrics.enable_sampling=false",
    "--checkpoint.save_final=false",
]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps per case (default: 20)")
    parser.add_argument(
        "--out", type=Path, help="JSON to write, such as benchmarks/results/lora_against_full_cuda.json"
    )
    arguments, flags = parser.parse_known_args(argv)
    if arguments.steps < 3:
        parser.error("--steps must be at least 3: the first two warm up")
    return arguments, flags


def measure(flags: list[str], *, steps: int) -> dict[str, Any]:
    """One case: seconds per step, peak memory and images/s; or the reason for which it failed."""
    with tempfile.TemporaryDirectory() as folder:
        place = [f"--job.dump_folder={folder}", "--metrics.experiment_name=run"]
        job = Job((*TRAIN, *flags, f"--training.steps={steps}", *place), Path(folder) / "run")
        if (outcome := execute(job)).status != "completed":
            return {"failed": outcome.reason}
        records = read_metrics(job.folder)
    times = [record["step_time_s"] for record in records[2:]]
    return {
        "step_time_s": statistics.median(times),
        "times_s": times,
        "peak_memory_gib": max(record["peak_memory_gib"] for record in records),
        "tflops_per_device": statistics.median(record["tflops_per_device"] for record in records[2:]),
        "mfu": statistics.median(rates) if (rates := [r["mfu"] for r in records[2:] if r["mfu"] is not None]) else None,
        "loss_last": records[-1]["loss"],
    }


def main() -> None:
    args, flags = parse(sys.argv[1:])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = {}
    for name, own in CASES.items():
        rows[name] = measure([*SHARED, *SIZES[device], *own, *flags], steps=args.steps)
        full, row = rows["full"], rows[name]
        if "failed" in row:
            print(f"{name}: {row['failed']}")
            continue
        line = f"{name}: {row['step_time_s']:.3f} s/step, {row['peak_memory_gib']:.2f} GiB"
        if row is not full and "failed" not in full:
            row["time_of_full"] = row["step_time_s"] / full["step_time_s"]
            row["memory_of_full"] = row["peak_memory_gib"] / full["peak_memory_gib"]
            line += f"; {row['time_of_full']:.2f} of the time and {row['memory_of_full']:.2f} of the memory of full"
        print(line, flush=True)
    if args.out is not None:
        content = {"command": sys.argv, "shared": [*SHARED, *SIZES[device], *flags], "device": device, "cases": rows}
        content["device_name"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        content |= {"versions": provenance.versions("diffusers", "peft"), "git_commit": provenance.git_commit()}
        write_file(args.out, json.dumps(content, indent=2).encode())
        print(f"written: {args.out}")


if __name__ == "__main__":
    main()
