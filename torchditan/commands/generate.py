# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Draw samples from a checkpoint as a labelled grid next to real images, and report the time per image.

torchditan generate outputs/quickstart
torchditan generate outputs/photos --classes owl,flower
torchditan generate scenes --prompts "a green triangle left of two yellow circles"
torchditan generate outputs/quickstart --classes 3,5 --sampling.guidance_scale 4 --sampling.sampler heun
torchditan generate outputs/flux_schnell_lora --prompts "TOK on the moon" "TOK, watercolour" --dtype bfloat16
torchditan generate outputs/sd3_medium_full --prompts "a red fox" --original
torchditan generate outputs/text_to_image --prompts @prompts.txt --sampling.negative_prompt "blurred"
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchditan.config.command_line import RunParser, add_float32_matmul_precision, check_output, count
from torchditan.config.prompts import read_prompts
from torchditan.errors import ConfigError, option_error
from torchditan.extras.weights.shared import check_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from torchditan.extras.weights.trained_model import TrainedModel
    from torchditan.sampling.drawing import SampleRows
    from torchditan.sampling.sampler import ToPixels


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this command, and the remaining `--sampling.*` flags for the configuration."""
    parser = RunParser(__doc__)
    parser.add_argument(
        "--prompts", nargs="+", help="texts to draw, or @FILE with one per line (default: sampling.prompts)"
    )
    parser.add_argument(
        "--classes", help="labels or names, such as 3,5 or owl (default: the first sampling.max_classes)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default: 0)")
    parser.add_argument("--batch_size", type=count, default=64, help="samples at once (default: 64)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="precision (default: float32; published models: the run's)"
    )
    add_float32_matmul_precision(parser)
    parser.add_argument("--without_lora", action="store_true", help="sample the base model without the LoRA")
    parser.add_argument(
        "--original", action="store_true", help="also sample the model that the run started from, with the same noise"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="PNG to write; replaces one of this name (default: a new one in samples/ of the run or outputs/NAME)",
    )
    arguments, flags = parser.parse(argv)
    check_address(arguments.run)
    if arguments.out is not None:
        check_output("--out", arguments.out)
        if arguments.out.suffix.lower() != ".png":
            raise option_error("--out", str(arguments.out), "must be a .png")
    if arguments.original and arguments.without_lora:
        raise option_error("--original", True, "already draws the model without its LoRA; leave --without_lora out")
    return arguments, flags


def choose_rows(trained: TrainedModel, args: argparse.Namespace) -> SampleRows:
    """The rows of the given classes or prompts. A number is a label, also where a class has it as its name."""
    if args.classes is None:
        return trained.rows(prompts=read_prompts("--prompts", args.prompts or []))
    words = [args.classes] if args.classes in trained.class_names else args.classes.split(",")
    words = [word.strip() for word in words]
    return trained.rows(classes=[int(word) if word.isdecimal() else word for word in words], prompts=args.prompts)


def note_unlike_training(trained: TrainedModel, prompts: Sequence[str]) -> None:
    """Name the prompts that a model of scenes cannot draw: it saw nothing but the captions of their grammar."""
    from torchditan.datasets.scenes import Scene

    if not trained.takes_prompts or trained.config.dataset.dataset_name != "scenes":
        return
    for prompt in prompts:
        try:
            Scene.parse(prompt)
        except ConfigError:
            print(
                f'note: no training picture has a caption like "{prompt}"; all show one to three circles, squares or '
                "triangles",
                file=sys.stderr,
            )


def real_images(trained: TrainedModel, rows: SampleRows, to_pixels: ToPixels) -> torch.Tensor | None:
    """Training images of each class (rows, k, C, H, W); None for prompts, and without the training data."""
    from torchditan.sampling.sample_grids import real_samples

    config = trained.config
    if trained.takes_prompts:
        return None
    try:
        dataset = trained.open_images("train")
    except ConfigError as error:
        print(f"note: without the training data, the picture shows no real images: {error}", file=sys.stderr)
        return None
    return real_samples(
        dataset,
        labels=rows.numbers,
        samples_per_label=config.sampling.images_per_class,
        conditional=trained.num_classes > 0,
        to_pixels=(lambda samples: samples) if config.autoencoder.online else to_pixels,
    )


def new_file(path: Path) -> Path:
    """`a.png`, or `a_2.png`, `a_3.png`, ... if there is one: a picture with other options has the same name."""
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], numbered) if not free.exists())


def main() -> None:
    args, flags = parse(sys.argv[1:])

    import torch

    from torchditan.distributed.cpu_threads import configure_cpu
    from torchditan.extras.weights.trained_model import TrainedModel
    from torchditan.run.progress import report_progress
    from torchditan.sampling.grid_picture import save_grid, stills
    from torchditan.sampling.reconstruction import similarity

    configure_cpu()
    torch.set_float32_matmul_precision(args.float32_matmul_precision)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    with report_progress(f"loading {args.run}"):
        trained = TrainedModel.open(args.run, step=args.step, weights=args.weights, dtype=dtype, flags=flags)
        to_pixels = trained.open_decoder() if trained.missing_decoder is None else lambda samples: samples
    if trained.missing_decoder is not None:
        print(f"note: the picture shows latent channels: {trained.missing_decoder}", file=sys.stderr)
    if args.without_lora:
        trained.turn_off_adapter()
    if args.original:
        trained.check_original()
    with report_progress("encoding prompts" if trained.takes_prompts else "reading real images"):
        rows = choose_rows(trained, args)
        note_unlike_training(trained, rows.names)
        real = real_images(trained, rows, to_pixels)

    sampling = trained.config.sampling
    given = {"samples_per_row": sampling.images_per_class, "seed": args.seed, "batch_size": args.batch_size}
    num_images = len(rows.names) * sampling.images_per_class
    start = time.perf_counter()
    samples = trained.generate_rows(rows, **given)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    with report_progress(f"decoding {num_images} samples"):
        pictures = stills(to_pixels(samples))
    decoding_seconds = time.perf_counter() - start

    similarities = ""
    if args.original:
        print(f"original: {trained.restore_original()}")
        real = stills(to_pixels(trained.generate_rows(rows, **given)))
        found = similarity(pictures, real)
        similarities = "".join(f", {name.upper()} {value:.4g}" for name, value in found.items())

    if real is not None and real.shape[2:] != pictures.shape[2:]:
        sizes = [" x ".join(map(str, images.shape[-2:])) for images in (real, pictures)]
        print(f"note: the picture shows no real images: the data has {sizes[0]}, the model {sizes[1]}", file=sys.stderr)
        real = None

    without = "_without_lora" if args.without_lora else "_and_original" if args.original else ""
    out = args.out or new_file(
        trained.folder / "samples" / f"generated_{trained.step:08d}_seed{args.seed}{without}.png"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    save_grid(
        out,
        pictures,
        real,
        rows.names,
        real_heading="original" if args.original else trained.real_heading,
        title=f"{trained.config.metrics.experiment_name}, step {trained.step}, {trained.weights} weights, "
        f"{sampling.sampler} {sampling.num_steps} steps, guidance {sampling.guidance_scale:g}"
        + (", without the LoRA" if args.without_lora else ""),
    )
    evaluations = trained.objective.num_evaluations(sampling)
    print(
        f"{num_images} images in {seconds:.2f} s on {trained.device.type} ({torch.get_num_threads()} threads): "
        f"{seconds / num_images:.4f} s/image, {evaluations * -(-num_images // args.batch_size) / seconds:.1f} "
        f"model steps/s at batch {min(num_images, args.batch_size)}, {str(trained.dtype).removeprefix('torch.')}"
        + (f"; decoded in {decoding_seconds:.2f} s more" if trained.is_latent else "")
    )
    comparison = f" next to the original's{similarities}" if args.original else ", generated next to real"
    print(f"samples{comparison if real is not None else ''}: {out}")
