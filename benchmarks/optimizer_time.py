#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Time of a training step with AdamW and with Muon: `python benchmarks/optimizer_time.py --batch_size 16 256`.

Notable:
- the step is the trainer's, without EMA; all cases take turns in one process, A B A B, and the median counts;
- the FLOPs of Newton-Schulz are printed as a share of those of forward and backward, to compare with the time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from step_cases import SAMPLE_SHAPES, Case, build_ours, build_spec, fill_with_normal, make_batch, trainer_step
from step_measure import one_process, time_steps

from torchditan.config.options import Optimizer
from torchditan.models.flops import count_model_flops
from torchditan.optim.optimizers import optimizer_flops


def main(argv: Sequence[str]) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description="Time of a training step with AdamW and with Muon.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=list(SAMPLE_SHAPES), default="DiT-S", help="flavor, at patch size 2")
    add("--batch_size", type=int, nargs="+", default=[16, 256], help="images per step")
    add("--precision", choices=["fp32", "bf16"], default="bf16" if cuda else "fp32", help="of forward and backward")
    add("--compile", action="store_true", help="compile the blocks")
    add("--repeats", type=int, default=7, help="measured steps of each case")
    add("--warmup", type=int, default=2, help="steps before them")
    args = parser.parse_args(argv)

    device = torch.device("cuda" if cuda else "cpu")
    mode = "per_block" if args.compile else "eager"
    case = Case("ours", args.model, "torchditan", args.precision, mode, "trainer")
    spec = build_spec(case)
    optimizers = {
        "AdamW": Optimizer(),
        "Muon, bfloat16": Optimizer(name="Muon"),
        "Muon, float32": Optimizer(name="Muon", ns_dtype="float32"),
    }
    print(f"load average {os.getloadavg()[0]:.2f}, {torch.get_num_threads()} threads, {device}")
    with one_process():
        steps = {}
        for name, optimizer in optimizers.items():
            model = build_ours(spec, case, device)
            fill_with_normal(model)
            steps[name] = trainer_step(model.train(), spec, case, optimizer)
            shapes = [(key, tuple(weight.shape)) for key, weight in model.named_parameters()]
        newton_schulz = optimizer_flops(optimizers["Muon, bfloat16"], shapes)
        for batch_size in args.batch_size:
            batch = make_batch(spec, batch_size, device)
            times: dict[str, list[float]] = {name: [] for name in steps}
            for step in steps.values():
                time_steps(step, batch, steps=args.warmup, device=device)
            for _ in range(args.repeats):
                for name, step in steps.items():
                    times[name] += time_steps(step, batch, steps=1, device=device)
            share = newton_schulz / (batch_size * count_model_flops(spec).total)
            print(f"{args.model}, batch {batch_size}: Newton-Schulz adds {share:.1%} FLOPs")
            adamw = float(np.median(times["AdamW"]))
            for name, seconds in times.items():
                median = float(np.median(seconds))
                print(f"  {name:14}  {median:8.4f} s  {median / adamw:.2f} x AdamW", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
