# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Compute averages of the weights after training, of any width, from the snapshots of a run with ema.post_hoc_widths.
Each average becomes a run directory for torchditan generate and evaluate (docs/optimizer_and_ema.md).

torchditan average outputs/imagenet --width 0.075
torchditan generate outputs/imagenet_ema_0.075
torchditan average outputs/imagenet --width 0.03 0.05 0.1 0.15
torchditan sweep outputs/imagenet_ema_* --guidance_scale 1 1.5 --out outputs/widths
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    from torchditan.config.command_line import ScriptParser
    from torchditan.config.errors import option_error
    from torchditan.config.loader import override
    from torchditan.config.options import Config

    parser = ScriptParser(__doc__, options=())
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, for example outputs/imagenet")
    parser.add_argument(
        "--width",
        type=float,
        nargs="+",
        required=True,
        metavar="WIDTH",
        help="standard deviation of the average's profile, relative to the steps that it covers; 0.05 0.1 makes two",
    )
    parser.add_argument("--step", type=int, help="last step of the average, which has a snapshot (default: the newest)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="start of the directories' names (default: RUN_ema)")
    parser.add_argument("--overwrite", action="store_true", help="replace directories of an earlier call")
    arguments, rest = parser.parse(sys.argv[1:])
    override(Config(), rest, sections=())  # refuses extra arguments
    for width in arguments.width:
        if not 0 < width < 0.2887:
            raise option_error("--width", width, "must be above 0 and below 0.2887, the width of a uniform average")

    from torchditan.run.progress import report_progress
    from torchditan.weights.importing import refuse_existing
    from torchditan.weights.reconstructed_ema import LARGE_ERROR, reconstruct

    run = arguments.run
    stem = arguments.out or run.resolve().parent / f"{run.resolve().name}_ema"
    step = "" if arguments.step is None else f"_step_{arguments.step}"
    outs = {width: stem.with_name(f"{stem.name}_{width:g}{step}") for width in arguments.width}
    if len({*outs.values()}) < len(arguments.width):
        raise option_error("--width", arguments.width, "two of these give the same folder; leave one out")
    for out in outs.values():
        refuse_existing(out, overwrite=arguments.overwrite)
    for width, out in outs.items():
        with report_progress(f"computing the average of width {width:g}"):
            made = reconstruct(run, out, width=width, step=arguments.step, overwrite=arguments.overwrite)
        print(
            f"{out}: average of width {width:g} at step {made.step}, from {made.num_read} of {made.num_stored} stored "
            f"averages; its profile differs by {100 * made.error:.2g}%"
        )
        if made.error > LARGE_ERROR:
            right = "take a width nearer to those of ema.post_hoc_widths, or train with a shorter ema.post_hoc_interval"
            print(f"warning: the snapshots cannot give the width {width:g} accurately; {right}", file=sys.stderr)
