# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Import weights as a run that can be sampled, evaluated and continued: a file of `torchditan export`, or a checkpoint
of DiT, SiT, REPA, LightningDiT or diffusers (docs/checkpoints.md).

torchditan import quickstart.safetensors outputs/from_a_friend
torchditan import DiT-XL-2-256x256.pt outputs/dit_xl --format dit
torchditan generate outputs/from_a_friend
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this command, and the remaining flags for the run's configuration."""
    from torchditan.config.command_line import ScriptParser, count
    from torchditan.errors import option_error
    from torchditan.extras.weights.formats import IMPORT_OPTIONS
    from torchditan.registry import FORMATS

    parser = ScriptParser(__doc__, options=("dataset", "autoencoder", "sampling"))
    what = "a file of `export` or a shared model; with --format a .pt, .pth, .bin or .safetensors file, or a folder"
    parser.add_argument("path", type=Path, metavar="WEIGHTS", help=what)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory to create")
    parser.add_argument("--overwrite", action="store_true", help="replace an imported run")
    parser.add_argument(
        "--format",
        help=f"the project that trained these weights: {', '.join(FORMATS)}, or module:name. The options below need "
        "it, and so do most options of training",
    )
    parser.add_argument("--weights", choices=("ema", "raw"), help="which weights of a training file (default: ema)")
    parser.add_argument("--num_heads", type=count, help="attention heads, if the model has no published size")
    parser.add_argument(
        "--sample_size",
        type=count,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="size of the model's input in pixels or latent cells, if it is not square",
    )
    parser.add_argument("--num_classes", type=count, help="new label table for this number of other classes")
    parser.add_argument("--noise_schedule", help="diffusion.noise_schedule, for a diffusers folder without scheduler/")
    parser.add_argument("--prediction", help="diffusion.prediction, for a diffusers folder without scheduler/")
    arguments, flags = parser.parse(argv)
    if arguments.format is None:
        for name in ("weights", "num_classes", *IMPORT_OPTIONS):
            if getattr(arguments, name) is not None:
                raise option_error(
                    f"--{name}", getattr(arguments, name), "has an effect only with --format; see --help"
                )
    return arguments, flags


def main() -> None:
    arguments, flags = parse(sys.argv[1:])

    from torchditan.extras.weights.formats import IMPORT_OPTIONS
    from torchditan.extras.weights.importing import CONTINUE_FILE, import_weights
    from torchditan.run.progress import report_progress

    path, run, values = arguments.path, arguments.run, vars(arguments)
    start = time.perf_counter()
    with report_progress(f"importing {path}"):
        weights = import_weights(
            path,
            run,
            format=arguments.format,
            kind=arguments.weights,
            given={name: values[name] for name in IMPORT_OPTIONS if values[name] is not None},
            num_classes=arguments.num_classes,
            flags=flags,
            overwrite=arguments.overwrite,
        )
    if arguments.format is None:
        print(f"{run}: {weights.kind} weights of step {weights.step}, for torchditan generate and evaluate")
        return
    print(
        f"{run}: {weights.kind} weights of {path}, {weights.num_values / 1e6:,.1f}M parameters in "
        f"{time.perf_counter() - start:.1f} s"
    )
    for note in weights.notes:
        print(f"- {note}")
    dataset = weights.checked_config().dataset
    needs_images = dataset.root_dir is None and dataset.dataset_name in ("folder", "imagenet")
    images = " --dataset.root_dir IMAGES" if needs_images else ""
    print(f"generate: torchditan generate {shlex.quote(str(run))}")
    print(f"evaluate: torchditan evaluate {shlex.quote(str(run))}{images}")
    print(f"continue: torchditan train {shlex.quote(str(run / CONTINUE_FILE))}{images}")
