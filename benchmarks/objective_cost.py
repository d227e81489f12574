#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""FLOPs and time of a training step by objective, as ratios of flow matching: `python benchmarks/objective_cost.py`.

Each round computes the loss and its gradients once per objective, in turns, on random samples. The time of an objective
in a round is divided by that of flow matching in the same round; the median of the ratios counts. The optimizer is left
out, because it is the same for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.config.options import Diffusion, Model
from torchditan.diffusion.loss_flops import count_loss_flops
from torchditan.diffusion.objectives import build_objective, split
from torchditan.models import build_model_spec, scalars_of
from torchditan.randomness import draw
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

OBJECTIVES = ("flow_matching", "imf tangent=data", "imf", "imf guidance=true")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Step:
    """One objective with its model and a batch."""

    def __init__(self, text: str, args: argparse.Namespace, device: torch.device) -> None:
        shape = tuple(args.sample_shape)
        config = Diffusion(objective=text)
        model = Model(flavor=args.flavor, patch_size=args.patch_size, timestep_scale=1.0)
        spec = build_model_spec(model, sample_shape=shape, num_classes=10, scalars=scalars_of(config))
        self.objective = build_objective(config, spec)
        spec = spec.with_heads(self.objective.heads)
        self.flops = count_loss_flops(config, spec).total
        self.model = spec.build().to(device, DTYPES[args.dtype])
        index = list(range(args.batch_size))
        self.batch = {
            "sample": torch.randn(args.batch_size, *shape, device=device),
            "class_label": torch.tensor(index, device=device) % 10,
        }
        self.randomness = draw(0, index, shape, self.objective.numbers).to(device)

    def __call__(self) -> float:
        """Seconds of forward and backward."""
        wait()
        start = time.perf_counter()
        losses, _ = split(self.objective.loss(self.model, self.batch, self.randomness))
        losses.mean().backward()
        wait()
        seconds = time.perf_counter() - start
        self.model.zero_grad()
        return seconds


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="DiT-Ti", help="default: DiT-Ti, as the quickstart")
    parser.add_argument("--patch_size", type=int, default=2)
    parser.add_argument("--sample_shape", type=int, nargs=3, default=(1, 8, 8), help="default: 1 8 8")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON to write (default: none)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = {text: Step(text, args, device) for text in OBJECTIVES}
    for step in steps.values():
        step()  # warm up
    times: dict[str, list[float]] = {text: [] for text in OBJECTIVES}
    for _ in range(args.rounds):
        for text, step in steps.items():
            times[text].append(step())
    rows: dict[str, Any] = {}
    for text, step in steps.items():
        ratios = [own / base for own, base in zip(times[text], times[OBJECTIVES[0]], strict=True)]
        rows[text] = {
            "flops": step.flops / steps[OBJECTIVES[0]].flops,
            "time": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios)[::2],
            "seconds": statistics.median(times[text]),
        }
        low, high = rows[text]["quartiles"]
        print(
            f"{text:20} FLOPs {rows[text]['flops']:.2f}  time {rows[text]['time']:.2f} ({low:.2f} to {high:.2f})  "
            f"{rows[text]['seconds']:.3f} s"
        )
    if args.out is not None:
        content = {
            "command": sys.argv,
            "threads": torch.get_num_threads(),
            "rows": rows,
            "versions": provenance.versions("torch"),
            "git_commit": provenance.git_commit(),
            "hardware": provenance.hardware(device.type, 1),
        }
        write_file(args.out, (json.dumps(content, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
