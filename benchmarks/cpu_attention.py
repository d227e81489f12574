#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Attention in bfloat16 on a CPU: batched products against torch's kernel: `python benchmarks/cpu_attention.py`.

Each round computes forward and backward once either way, in turns. The median of the ratios of each round counts. Keep
the machine idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.models.attention import attention_by_products
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

SHAPES = {
    "quickstart": (128, 3, 16, 64),
    "earth": (16, 4, 64, 32),
    "DiT-S/2, batch 16": (16, 6, 256, 64),
    "1,024 tokens": (4, 6, 1024, 64),
}
"""(B, H, N, K). The last two are computed by torch's kernel in training."""


def seconds(attend: Callable[..., torch.Tensor], heads: list[torch.Tensor]) -> float:
    """Of forward and backward."""
    start = time.perf_counter()
    attend(*heads).sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON to write (default: none)")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, (batch, num_heads, tokens, width) in SHAPES.items():
        # as the model makes them: heads and tokens transposed
        heads = [torch.randn(batch, tokens, num_heads, width).bfloat16().transpose(1, 2) for _ in range(3)]
        heads = [x.requires_grad_() for x in heads]
        ways = (F.scaled_dot_product_attention, attention_by_products)
        for attend in ways:
            seconds(attend, heads)  # warm up
        times = [[seconds(attend, heads) for attend in ways] for _ in range(args.rounds)]
        ratios = [products / kernel for kernel, products in times]
        rows[name] = {
            "shape": [batch, num_heads, tokens, width],
            "ratio": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios)[::2],
            "kernel_ms": 1e3 * statistics.median(kernel for kernel, _ in times),
            "products_ms": 1e3 * statistics.median(products for _, products in times),
        }
        low, high = rows[name]["quartiles"]
        print(
            f"{name:18} kernel {rows[name]['kernel_ms']:.2f} ms  products {rows[name]['products_ms']:.2f} ms  "
            f"ratio {rows[name]['ratio']:.2f} ({low:.2f} to {high:.2f})"
        )
    if args.out is not None:
        content = {
            "command": sys.argv,
            "threads": torch.get_num_threads(),
            "rows": rows,
            "versions": provenance.versions("torch"),
            "git_commit": provenance.git_commit(),
            "hardware": provenance.hardware("cpu", 1),
        }
        write_file(args.out, (json.dumps(content, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
