# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Export the weights of a run to one safetensors file with its configuration, or import weights as a run that can be
sampled, evaluated and continued: such a file, or a checkpoint of DiT, SiT, REPA, LightningDiT or diffusers
(docs/checkpoints.md). Also exports a full fine-tune of a published model, or a DiT, to a folder that diffusers opens.

torchditan export outputs/quickstart quickstart.safetensors
torchditan export outputs/quickstart/checkpoint/step-00000400 raw.safetensors --weights raw
torchditan export outputs/sd3_medium_full my_sd3 --format diffusers --dtype bfloat16
torchditan import quickstart.safetensors outputs/from_a_friend
torchditan import DiT-XL-2-256x256.pt outputs/dit_xl --format dit
torchditan refit_time outputs/quickstart scale_1.safetensors
torchditan generate outputs/from_a_friend

`refit_time` fits the embedding of t at scale 1 to its old outputs, for one-step training from these weights
(docs/recipes.md). `export --help`, `import --help` and `refit_time --help` list the options. To start a new run from
an exported file, train with --checkpoint.initial_load_path FILE.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path


def export_file(argv: list[str]) -> None:
    from torchditan.config.command_line import ScriptParser, check_new_file

    parser = ScriptParser(__doc__, options=())
    parser.prog = f"{parser.prog} export"
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN",
        help="run, checkpoint, file of `export`, or shared model",
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="file to write; with --format diffusers the folder to create"
    )
    parser.add_argument(
        "--format",
        choices=("torchditan", "diffusers"),
        default="torchditan",
        help="one .safetensors file with the configuration, or a folder for diffusers' pipelines (default: torchditan)",
    )
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--weights", choices=("ema", "raw"), help="which weights (default: ema if the run has them)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    arguments, _ = parser.parse(argv)
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
        why = f" (the transformer alone: {exported.left_out})" if exported.left_out else ""
        print(f"in diffusers: {exported.how_to_open}{why}", *exported.notes, sep="\n")


def parse_import(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of `import`, and the remaining flags for the run's configuration."""
    from torchditan.config.command_line import ScriptParser, count
    from torchditan.errors import option_error
    from torchditan.extras.weights.formats import IMPORT_OPTIONS
    from torchditan.registry import FORMATS

    parser = ScriptParser(__doc__, options=("dataset", "autoencoder", "sampling"))
    parser.prog = f"{parser.prog} import"
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


def import_file(argv: list[str]) -> None:
    arguments, flags = parse_import(argv)

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


def refit_time_of_file(argv: list[str]) -> None:
    from torchditan.config.command_line import ScriptParser, check_new_file

    parser = ScriptParser(__doc__, options=())
    parser.prog = f"{parser.prog} refit_time"
    parser.add_argument("source", type=Path, metavar="RUN", help="run, checkpoint, file of `export`, or shared model")
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write (.safetensors)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--weights", choices=("ema", "raw"), help="which weights (default: ema if the run has them)")
    parser.add_argument("--without_data", action="store_true", help="do not measure the loss before and after")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    arguments, _ = parser.parse(argv)
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


def main() -> None:
    commands = {"export": export_file, "import": import_file, "refit_time": refit_time_of_file}
    commands[sys.argv[1]](sys.argv[2:])
