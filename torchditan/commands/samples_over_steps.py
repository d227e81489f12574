# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Show how a run's samples improve: a strip (steps.png) and an animation (steps.gif), cut out of its sample grids.

torchditan timeline outputs/quickstart
torchditan timeline outputs/quickstart --classes 0,1,2 --columns 6 --out pictures

The strip shows the first sample of each class, the animation all of them. Nothing is sampled again. A run draws more
grids with --metrics.sample_freq.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def read_grids(run: Path) -> tuple[dict[int, Tensor], list[str]]:
    """Step -> generated images (rows, k, H, W, 3) of the run's grids, and the labels of the rows.

    Grids of other rows or another size than the newest one are left out.

    Raises:
        ConfigError: the run has no grid, an older version drew its grids, or a grid is damaged.
    """
    from torchditan.config.errors import ConfigError
    from torchditan.evaluation.grid_picture import read_cells
    from torchditan.run.reading import check_folder

    check_folder(run, mark="config.json", what="a run directory")
    paths = sorted(path for path in (run / "samples").glob("step_*.png") if path.stem[5:].isdecimal())
    if not paths:
        raise ConfigError(f"{run}/samples has no grids; train with --metrics.sample_freq 100, for example")
    grids = {int(path.stem[5:]): read_cells(path) for path in paths}
    known = {step: grid for step, grid in grids.items() if grid is not None}
    if not known:
        raise ConfigError(f"{run}/samples: an older version drew these grids and did not store their layout")
    cells, labels = known[max(known)]
    alike = {step: grid for step, (grid, names) in known.items() if grid.shape == cells.shape and names == labels}
    return alike, labels


def choose_rows(text: str | None, *, labels: list[str]) -> list[int]:
    """Rows of the grid that `--classes 0,2` asks for; all of them by default.

    Raises:
        ConfigError: a number is not a row.
    """
    from torchditan.config.errors import option_error

    if text is None:
        return list(range(len(labels)))
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) < len(labels) for word in words):
        raise option_error("--classes", text, f"must be rows of the grids, 0 to {len(labels) - 1}: 0,1 for example")
    return [int(word) for word in words]


def main() -> None:
    from torchditan.config.command_line import ScriptParser, check_output, count

    parser = ScriptParser(__doc__, options=())
    parser.add_argument("run", type=Path, help="run directory: outputs/quickstart")
    parser.add_argument("--classes", help="rows of the grids, 0,1,2 (default: all)")
    parser.add_argument("--columns", type=count, default=8, help="steps in the strip, evenly chosen (default: 8)")
    parser.add_argument("--frame_ms", type=count, default=500, help="milliseconds per frame of the GIF (default: 500)")
    parser.add_argument("--out", type=Path, help="folder to write to (default: samples/ of the run)")
    args, _ = parser.parse(sys.argv[1:])
    out = args.out or args.run / "samples"
    if args.out is not None:
        check_output("--out", out / "steps.png")

    from torchditan.evaluation.grid_picture import save_animation, save_strip

    grids, labels = read_grids(args.run)
    rows = choose_rows(args.classes, labels=labels)
    names = [labels[row] for row in rows]
    frames = {step: cells[rows] for step, cells in grids.items()}
    steps = list(frames)
    num_columns = min(args.columns, len(steps))
    places = [round(column * (len(steps) - 1) / max(1, num_columns - 1)) for column in range(num_columns)]
    shown = [steps[place] for place in places] if num_columns > 1 else steps[-1:]
    title = args.run.resolve().name
    out.mkdir(parents=True, exist_ok=True)
    save_strip(out / "steps.png", {step: frames[step][:, 0] for step in shown}, names, title=title)
    save_animation(out / "steps.gif", frames, names, title=title, seconds=args.frame_ms / 1000)
    print(f"strip of {len(shown)} steps: {out / 'steps.png'}")
    print(f"animation of {len(steps)} steps: {out / 'steps.gif'}")
