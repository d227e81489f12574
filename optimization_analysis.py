#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What ablation grids say: matched pairs, effects, plots and findings, in one report.html that opens offline.

python optimization_analysis.py outputs/GRID
python optimization_analysis.py outputs/A40_GRID outputs/A100_GRID --out outputs/a40_a100
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parse(argv: list[str]) -> argparse.Namespace:
    from torchditan.command_line import ScriptParser

    parser = ScriptParser(__doc__, options=())
    parser.epilog = None
    parser.add_argument("folders", type=Path, nargs="+", metavar="grid", help="grid folders, outputs/GRID say")
    parser.add_argument("--out", type=Path, help="folder to write to (default: analysis/ in the first grid folder)")
    return parser.parse(argv)[0]


def main() -> None:
    args = parse(sys.argv[1:])

    from torchditan.ablation.report import write_report

    report = write_report(args.folders, args.out or args.folders[0] / "analysis")
    print(f"report: {report}")


if __name__ == "__main__":
    from torchditan.verdict import run_job

    sys.exit(run_job(main))
