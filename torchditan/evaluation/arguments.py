# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Arguments of scripts/evaluate.py. The import needs no torch, so that a wrong option is refused at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchditan.config.command_line import RunParser, add_float32_matmul_precision, check_output, count
from torchditan.config.errors import ConfigError, did_you_mean, option_error
from torchditan.registry import METRICS

DEFAULT_METRICS = ("effnet", "classifier")
"""Those that the run and the number of samples allow."""
NUM_SAMPLES = 2600
"""More than twice the 1,280 features of EfficientNet-Lite0, so that both halves have a full-rank covariance."""
_OF_SAMPLES = (
    *("samples_per_class", "num_samples", "step", "weights", "class_balance", "save_images", "rounding", "seeds"),
    "float32_matmul_precision",
)
"""Options without effect on the images of a file."""


def parse_arguments(argv: list[str], *, description: str | None) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of the script, and the remaining flags for the run's configuration.

    Raises:
        ConfigError: an option is wrong, or has no effect together with another one.
    """
    parser = RunParser(description, is_run_required=False)
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help=f"what to compute, any of {', '.join(METRICS)} (default: {' and '.join(DEFAULT_METRICS)}, if possible)",
    )
    samples = parser.add_mutually_exclusive_group()
    samples.add_argument("--num_samples", type=count, help=f"samples of each seed (default: {NUM_SAMPLES})")
    samples.add_argument("--samples_per_class", type=count, help="samples of each class; sets --class_balance balanced")
    parser.add_argument("--seed", type=int, default=1, help="seed of the noise (default: 1)")
    parser.add_argument("--seeds", type=count, default=1, help="number of seeds, from --seed on (default: 1)")
    parser.add_argument("--batch_size", type=count, default=250, help="samples at once on each rank (default: 250)")
    parser.add_argument(
        "--class_balance",
        choices=("data", "balanced", "random"),
        help="classes: as often as in the training images, equally often, or drawn at random (default: data)",
    )
    parser.add_argument(
        "--rounding",
        choices=("nearest", "down"),
        default="nearest",
        help="from the model's output to 8 bits (default: nearest; ADM's scripts round down)",
    )
    add_float32_matmul_precision(parser)
    parser.add_argument("--weights", choices=("ema", "raw"), help="which weights (default: ema if the run has them)")
    parser.add_argument("--epochs", type=count, default=20, help="epochs of the classifier (default: 20)")
    parser.add_argument("--reference", type=Path, help=".npz of images or statistics that replaces the training images")
    parser.add_argument(
        "--without_data", action="store_true", help="with --reference: read no images of the run, so no copy check"
    )
    parser.add_argument("--images", type=Path, help=".npz of images to evaluate instead of the run's samples")
    parser.add_argument("--inception_weights", type=Path, help="weights file (default: torch-fidelity's, downloaded)")
    parser.add_argument("--out", type=Path, help="folder of the card (default: in evaluation/ of the run)")
    parser.add_argument("--save_images", action="store_true", help="write the samples as samples.npz, as ADM's scripts")
    parser.add_argument(
        "--save_reference",
        type=Path,
        metavar="FILE.npz",
        help="write the training images and their statistics",
    )
    parser.add_argument("--card", type=Path, help="repeat the evaluation of this card, and say what differs")
    args, flags = parser.parse(argv)
    _check(args, flags, parser)
    args.class_balance = "balanced" if args.samples_per_class is not None else args.class_balance or "data"
    return args, flags


def _check(args: argparse.Namespace, flags: list[str], parser: RunParser) -> None:
    for name in args.metrics or ():
        if name not in METRICS:
            hint = f"; put the run first: evaluate.py {name} --metrics ..." if Path(name).is_dir() else ""
            right = f"must be one of {', '.join(METRICS)}{hint or did_you_mean(name, METRICS)}"
            raise option_error("--metrics", name, right)
    if args.run is None and args.images is None and args.card is None:
        raise ConfigError("the following arguments are required: run, a run directory such as outputs/quickstart")
    if args.without_data and args.reference is None:
        raise option_error("--without_data", True, "needs a --reference to compare with")
    if args.run is None and args.images is not None and args.reference is None:
        raise option_error("--reference", None, "must be given with --images, or give the run whose data is compared")
    if args.samples_per_class is not None and args.class_balance not in (None, "balanced"):
        raise option_error("--class_balance", args.class_balance, "--samples_per_class needs balanced")
    for option in _OF_SAMPLES if args.images is not None else ():
        if getattr(args, option) != parser.get_default(option):
            raise option_error(f"--{option}", getattr(args, option), "has no effect with --images; leave it out")
    if args.images is not None and flags:
        raise ConfigError(f"{flags[0]} has no effect with --images; leave it out")
    if args.save_reference is not None:
        if args.reference is not None or args.run is None:
            right = "writes the training images of a run, which must be the reference"
            raise option_error("--save_reference", str(args.save_reference), right)
        check_output("--save_reference", args.save_reference)
    if args.out is not None:
        check_output("--out", args.out / "card.json")
