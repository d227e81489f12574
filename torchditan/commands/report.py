# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Write a page about runs or ablation grids. It works offline.

Of run directories: losses, speed, memory, samples over time with a slider, a strip and a GIF, settings, and for several
runs the ratio of their training times, loss over time and what differs, in report.html.
Of ablation grids, or folders of runs: verdicts, effects, plots and warnings, in analysis/report.html.
With --compare: the page of several runs, or of the runs of a grid, as compare/compare.html.
The last two also write their plots as PNG and SVG files, and their numbers as CSV.

torchditan report outputs/quickstart
torchditan report outputs/quickstart outputs/other --out both.html
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
    from torchditan.config.optional_libraries import import_optional
    from torchditan.errors import ConfigError, option_error
    from torchditan.run.reading import similar_folder

    parser = ScriptParser(__doc__, options=())
    parser.add_argument(
        "folders", type=Path, nargs="*", metavar="folder", help="run directories; or grids, or folders of runs"
    )
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="run", help="run directories, or grids, whose runs are compared"
    )
    parser.add_argument("--labels", nargs="+", metavar="name", help="names of the runs (default: their folders')")
    parser.add_argument("--metrics", nargs="+", metavar="name", help="figures of quality to judge (default: all)")
    parser.add_argument(
        "--out",
        type=Path,
        help="output folder, of run directories also a file that ends with .html (default: the run, the folder next to "
        "the first of several, analysis/ or compare/ in the first grid, compare/ next to the first run)",
    )
    args, rest = parser.parse(argv)
    for library in ("jinja2", "matplotlib", "pandas"):
        import_optional(library, extra="analysis")
    from torchditan.extras.report.report import is_run  # it imports torch, which --help does without

    args.folders += map(Path, rest)
    if args.compare and args.folders:
        right = f"{args.folders[0]} is before --compare; give only grid folders, or all run directories after --compare"
        raise option_error("--compare", " ".join(map(str, args.compare)), right)
    for folder in args.folders:
        if not folder.exists():
            hint = similar_folder(folder, mark="config.json") or similar_folder(folder, mark="grid.json")
            what = "a run directory, a grid folder or a folder of run directories"
            raise ConfigError(f"{folder} does not exist; must be {what}{hint}")
    runs = [folder for folder in args.folders if is_run(folder)]
    if args.labels and not (args.compare or runs):
        raise option_error("--labels", " ".join(args.labels), "names runs; leave it out, or name runs, not grids")
    if args.metrics and (args.compare or runs):
        right = f"chooses figures of grids; leave out {'--compare' if args.compare else 'it, or name a grid'}"
        raise option_error("--metrics", " ".join(args.metrics), right)
    if not args.compare and not args.folders:
        parser.error("the following arguments are required: a run directory or a grid")
    return args


def main() -> None:
    from torchditan.extras.report.report import write_report

    args = parse(sys.argv[1:])
    report = write_report(
        args.compare or args.folders, compare=bool(args.compare), labels=args.labels, figures=args.metrics, out=args.out
    )
    if report.verdicts:
        print(report.verdicts)
    print(f"report: {report.path}")
