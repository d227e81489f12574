# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Fit the embedding of t at scale 1 to its old outputs, for one-step training from these weights (docs/recipes.md).

torchditan refit_time outputs/quickstart scale_1.safetensors
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def main() -> None:
    from torchditan.config.command_line import ScriptParser, add_weights_choice, check_new_file

    parser = ScriptParser(__doc__, options=())
    parser.add_argument("source", type=Path, metavar="RUN", help="run, checkpoint, file of `export`, or shared model")
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write (.safetensors)")
    add_weights_choice(parser)
    parser.add_argument("--without_data", action="store_true", help="do not measure the loss before and after")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    arguments, _ = parser.parse(sys.argv[1:])
    out = arguments.out
    check_new_file(out, overwrite=arguments.overwrite)
    from torchditan.extras.weights.refit_time import refit_time

    with_data = not arguments.without_data
    refit = refit_time(arguments.source, out, step=arguments.step, kind=arguments.weights, with_data=with_data)
    print(
        f"{out}: embedding of t refitted from scale {refit.scale:g} to 1, relative error {refit.relative_error:.3f} "
        "of its variation"
    )
    if refit.loss_before is not None:
        print(f"validation loss {refit.loss_before:.4f} before, {refit.loss_after:.4f} after")
    print(f"start from it: --checkpoint.initial_load_path {shlex.quote(str(out))}")
