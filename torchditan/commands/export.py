# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Export the weights of a run to one safetensors file with its configuration, or to a folder that diffusers opens.

torchditan export outputs/quickstart quickstart.safetensors
torchditan export outputs/quickstart/checkpoint/step-00000400 raw.safetensors --weights raw
torchditan export outputs/sd3_medium_full my_sd3 --format diffusers --dtype bfloat16

`torchditan import` makes a run of the file. A new run starts from it with --checkpoint.initial_load_path FILE.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main() -> None:
    from torchditan.config.command_line import ScriptParser, add_weights_choice, check_new_file

    parser = ScriptParser(__doc__, options=())
    parser.add_argument("source", type=Path, metavar="RUN", help="run, checkpoint, file of `export`, or shared model")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="file to write; with --format diffusers the folder to create"
    )
    parser.add_argument(
        "--format",
        choices=("torchditan", "diffusers"),
        default="torchditan",
        help="one .safetensors file with the configuration, or a folder for diffusers' pipelines (default: torchditan)",
    )
    add_weights_choice(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    arguments, _ = parser.parse(sys.argv[1:])
    is_folder = arguments.format == "diffusers"
    if not is_folder:
        check_new_file(arguments.out, overwrite=arguments.overwrite)

    from torchditan.checkpoint.safetensors_files import DTYPES
    from torchditan.extras.weights.opening import open_model
    from torchditan.run.progress import report_progress

    start = time.perf_counter()
    dtype = DTYPES[arguments.dtype]
    with report_progress(f"exporting {arguments.source}"):
        weights = open_model(arguments.source, step=arguments.step, kind=arguments.weights)
        if is_folder:
            from torchditan.extras.weights.diffusers_export import export_to_diffusers

            exported = export_to_diffusers(weights, arguments.out, dtype=dtype)
            files = [path for path in arguments.out.rglob("*") if path.is_file()]
        else:
            from torchditan.checkpoint.weights import save_weights

            save_weights(arguments.out, weights, dtype=dtype)
            files = [arguments.out]
    print(
        f"{arguments.out}: {weights.kind} weights of {arguments.source}, step {weights.step}, {arguments.dtype}, "
        f"{sum(path.stat().st_size for path in files) / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s"
    )
    if is_folder:
        print(exported.as_line(), *exported.notes, sep="\n")
