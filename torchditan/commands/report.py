# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Analyse ablation grids: verdicts, effects, plots and warnings in one report.html that works offline.
With --compare, compare runs of one job on different hardware: time, loss, PSNR, SSIM and samples, in compare.html.
The plots are also written as PNG and SVG files, the numbers as CSV.

torchditan report outputs/GRID
torchditan report outputs/A40_GRID outputs/A100_GRID --out outputs/a40_a100
torchditan report outputs/GRID_WITH_SEEDS --metrics FD-EffNetLite0
torchditan report outputs/FOLDER_OF_RUNS
torchditan report --compare outputs/cpu outputs/a40 outputs/a100 --labels CPU A40 A100
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parse(argv: list[str]) -> argparse.Namespace:
    from torchditan.config.command_line import ScriptParser
    from torchditan.config.errors import option_error

    parser = ScriptParser(__doc__, options=())
    parser.add_argument("folders", type=Path, nargs="*", metavar="grid", help="grid folders, or folders of runs")
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="run", help="run directories, or grids, to compare run by run"
    )
    parser.add_argument("--labels", nargs="+", metavar="name", help="names of the runs (default: their folders')")
    parser.add_argument("--metrics", nargs="+", metavar="name", help="figures of quality to judge (default: all)")
    parser.add_argument(
        "--out",
        type=Path,
        help="output folder (default: analysis/ or compare/ in the first grid, compare/ next to the first run)",
    )
    args, rest = parser.parse(argv)
    args.folders += map(Path, rest)
    if args.compare and args.folders:
        right = f"{args.folders[0]} is before --compare; give only grid folders, or all run directories after --compare"
        raise option_error("--compare", " ".join(map(str, args.compare)), right)
    if args.labels and not args.compare:
        raise option_error("--labels", " ".join(args.labels), "names runs; it needs --compare")
    if args.metrics and args.compare:
        raise option_error("--metrics", " ".join(args.metrics), "chooses figures of grids; leave out --compare")
    if not args.compare and not args.folders:
        parser.error("the following arguments are required: grid")
    return args


def main() -> None:
    from torchditan.config.optional_libraries import import_optional

    args = parse(sys.argv[1:])
    if args.compare:
        from torchditan.report.compare_page import write_comparison

        first = args.compare[0]
        out = args.out or (first if (first / "grid.json").exists() else first.absolute().parent) / "compare"
        report = write_comparison(args.compare, out, args.labels)
    else:
        from torchditan.report.grid_page import analyse, write_report
        from torchditan.report.verdict_tables import verdict_text

        for library in ("jinja2", "matplotlib", "pandas", "scipy"):
            import_optional(library, extra="analysis")
        analysis = analyse(args.folders, figures=args.metrics)
        report = write_report(analysis, args.out or args.folders[0] / "analysis")
        if analysis.verdicts:
            print(verdict_text(analysis.verdicts))
    print(f"report: {report}")
