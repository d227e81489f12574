# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Export the LoRA of a run as one safetensors file, for diffusers' pipelines or with the names of kohya's sd-scripts.

torchditan export_lora outputs/flux_schnell_lora mug.safetensors
torchditan export_lora outputs/flux_schnell_lora mug_kohya.safetensors --format kohya --dtype bfloat16

In diffusers: pipeline.load_lora_weights("mug.safetensors").
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    from torchditan.config.command_line import ScriptParser, add_weights_choice, check_new_file

    parser = ScriptParser(__doc__, options=())
    parser.add_argument("run", type=Path, help="run directory of a LoRA, such as outputs/flux_schnell_lora")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors", help="file to write")
    parser.add_argument("--format", choices=("diffusers", "kohya"), default="diffusers", help="default: diffusers")
    add_weights_choice(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    args, _ = parser.parse(sys.argv[1:])
    check_new_file(args.out, overwrite=args.overwrite)

    import torch

    from torchditan.extras.weights.lora_export import export_run
    from torchditan.run.progress import report_progress

    with report_progress(f"exporting {args.run}"):
        layers, step, ignored = export_run(
            args.run,
            args.out,
            format=args.format,
            step=args.step,
            weights=args.weights,
            dtype=getattr(torch, args.dtype),
        )
    if ignored:
        advice = "pictures will differ; train without proj_out and norm_out.linear (lora.target_modules)"
        print(f"warning: sd-scripts ignores {', '.join(ignored)}: {advice}", file=sys.stderr)
    size = args.out.stat().st_size / 1e6
    print(f"{args.out}: LoRA of {len(layers)} layers, step {step}, {args.format} names, {args.dtype}, {size:,.1f} MB")
