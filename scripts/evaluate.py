#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Metrics of a run's guided samples. The default trains a small classifier on real images to recognise their classes.

python scripts/evaluate.py outputs/quickstart
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from torchditan.evaluation.metric import Metric, Pictures
    from torchditan.weights.trained_model import TrainedModel


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this script, and the remaining flags for the run's configuration."""
    from torchditan.config.command_line import RunParser, count
    from torchditan.config.errors import did_you_mean, option_error
    from torchditan.registry import METRICS

    parser = RunParser(__doc__)
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=["classifier"],
        metavar="NAME",
        help=f"what to compute, any of {', '.join(METRICS)} (default: classifier)",
    )
    parser.add_argument("--samples_per_class", type=count, default=100, help="samples per class (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="seed of noise and classifier (default: 1)")
    parser.add_argument("--epochs", type=count, default=20, help="epochs of the classifier (default: 20)")
    args, flags = parser.parse(argv)
    for name in args.metrics:
        if name not in METRICS:
            right = f"must be one of {', '.join(METRICS)}{did_you_mean(name, METRICS)}"
            raise option_error("--metrics", name, right)
    return args, flags


def load(args: argparse.Namespace, flags: list[str]) -> TrainedModel:
    from torchditan.distributed.process_group import Rank
    from torchditan.run.progress import report_progress
    from torchditan.weights.trained_model import TrainedModel

    with report_progress(f"loading {args.run}"):
        return TrainedModel.load(args.run, step=args.step, device=Rank(0, 0, 1).device, flags=flags)


def show_real_images(metrics: list[Metric], trained: TrainedModel, datasets: dict[Any, Any]) -> None:
    """Pass all images of both splits to the metrics."""
    from torchditan.evaluation.metric import Pictures, batches_of
    from torchditan.evaluation.reconstruction import to_8_bit
    from torchditan.run.progress import report_progress

    with report_progress("reading real images"):
        for source, dataset in datasets.items():
            for samples, labels, indices in batches_of(dataset):
                images = to_8_bit(trained.real_to_pixels(samples)).byte()
                pictures = Pictures(images, labels if trained.num_classes else None, indices, source)
                for metric in metrics:
                    metric.update(pictures)


def draw(trained: TrainedModel, args: argparse.Namespace) -> Pictures:
    """Samples of all classes."""
    import torch

    from torchditan.evaluation.metric import Pictures
    from torchditan.evaluation.reconstruction import to_8_bit
    from torchditan.evaluation.sample_rows import SampleRows

    labels = list(range(max(1, trained.num_classes)))
    names = [str(label) for label in range(trained.num_classes)]
    rows = SampleRows.of_classes(labels, class_names=names)
    samples = trained.generate_rows(rows, samples_per_row=args.samples_per_class, seed=args.seed, batch_size=250)
    images = to_8_bit(trained.to_pixels(samples).flatten(0, 1)).byte()
    wanted = torch.tensor(labels).repeat_interleave(args.samples_per_class) if names else None
    return Pictures(images, wanted, torch.arange(len(images)), "generated")


def main() -> None:
    args, flags = parse(sys.argv[1:])

    from data import build_dataset
    from torchditan.config.errors import ConfigError
    from torchditan.config.options import dataset_channels
    from torchditan.distributed.cpu_threads import set_cpu_threads
    from torchditan.evaluation.metric import Evaluation, Figure
    from torchditan.registry import METRICS, registered

    set_cpu_threads()
    trained = load(args, flags)
    classes = [registered(METRICS, name) for name in args.metrics]
    if not trained.num_classes and any(cls.needs_labels for cls in classes):
        raise ConfigError(f"{args.run} was trained without labels, so its samples have no class")
    if trained.takes_prompts:
        raise ConfigError(f"{args.run} was trained on captions; must be a run on classes, or one without labels")
    channels = dataset_channels(trained.config)
    splits = {"train": "train", "held_out": "validation"}
    datasets: dict[Any, Any] = {
        source: build_dataset(trained.config.dataset, split=split, input_channels=channels)
        for source, split in splits.items()
    }
    class_names = datasets["train"].class_names if trained.num_classes else []
    metrics: list[Metric] = [cls(Evaluation(class_names, seed=args.seed, epochs=args.epochs)) for cls in classes]
    show_real_images(metrics, trained, datasets)
    pictures = draw(trained, args)
    result = {
        "run": str(args.run),
        "step": trained.step,
        "guidance_scale": trained.config.sampling.guidance_scale,
        "num_samples": len(pictures.images),
    }
    for metric in metrics:
        metric.update(pictures)
        found = {name: x.value if isinstance(x, Figure) else x for name, x in metric.compute().items()}
        assert not found.keys() & result.keys(), f"two metrics give {', '.join(found.keys() & result.keys())}"
        result |= found
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
