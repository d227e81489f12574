# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Export the LoRA of a run as one safetensors file, or the model with the LoRA folded in as a folder for diffusers.

torchditan export_lora outputs/flux_schnell_lora mug.safetensors
torchditan export_lora outputs/flux_schnell_lora mug_kohya.safetensors --format kohya --dtype bfloat16
torchditan export_lora outputs/flux_schnell_lora flux_with_mug --merge --dtype bfloat16

In diffusers: pipeline.load_lora_weights("mug.safetensors").
"""

from __future__ import annotations

import sys
from pathlib import Path

FORMATS = ("diffusers", "kohya", "comfyui")


def main() -> None:
    from torchditan.config.command_line import ScriptParser, add_weights_choice, check_new_file

    parser = ScriptParser(__doc__, options=())
    parser.add_argument("run", type=Path, help="run directory of a LoRA, such as outputs/flux_schnell_lora")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="OUT.safetensors to write, or with --merge the new folder"
    )
    help_format = "whose layer names; the last line says which programs read the file (default: diffusers)"
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--format", choices=FORMATS, default="diffusers", help=help_format)
    kind.add_argument("--merge", action="store_true", help="write the base model with the LoRA folded in")
    add_weights_choice(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    args, _ = parser.parse(sys.argv[1:])
    if not args.merge:
        check_new_file(args.out, overwrite=args.overwrite)

    from torchditan.checkpoint.safetensors_files import DTYPES
    from torchditan.run.progress import report_progress

    dtype = DTYPES[args.dtype]
    if args.merge:
        from torchditan.extras.weights.opening import open_weights
        from torchditan.extras.weights.pipeline_export import merge_lora

        with report_progress(f"merging {args.run}"):
            weights = open_weights(args.run, step=args.step, kind=args.weights)
            exported, lost = merge_lora(weights, args.out, dtype=dtype)
        print(f"{args.out}: base model with the LoRA of step {weights.step} folded in, {args.dtype}")
        print(f"rounding to {args.dtype} changed the update by {lost:.2%}")
        print(exported.as_line())
        return

    from torchditan.extras.weights.lora_export import export_run

    with report_progress(f"exporting {args.run}"):
        layers, step, readers = export_run(
            args.run, args.out, format=args.format, step=args.step, weights=args.weights, dtype=dtype
        )
    size = args.out.stat().st_size / 1e6
    print(f"{args.out}: LoRA of {len(layers)} layers, step {step}, {args.format} names, {args.dtype}, {size:,.1f} MB")
    print(readers)
