#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Ask a small classifier, trained on the real images, which class each guided sample of a run shows.

python scripts/evaluate.py outputs/quickstart
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    from torchditan.config.command_line import RunParser, count

    parser = RunParser(__doc__)
    parser.add_argument("--samples_per_class", type=count, default=100, help="samples of each class (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="seed of noise and classifier (default: 1)")
    parser.add_argument("--epochs", type=count, default=20, help="epochs of the classifier (default: 20)")
    args, flags = parser.parse(sys.argv[1:])

    from data import build_dataset
    from torchditan.config.errors import ConfigError
    from torchditan.config.options import dataset_channels
    from torchditan.distributed.cpu_threads import set_cpu_threads
    from torchditan.distributed.process_group import Rank
    from torchditan.evaluation.classifier import accuracy, as_tensors, train_classifier
    from torchditan.run.progress import report_progress
    from torchditan.weights.trained_model import TrainedModel

    set_cpu_threads()
    with report_progress(f"loading {args.run}"):
        trained = TrainedModel.load(args.run, step=args.step, device=Rank(0, 0, 1).device, flags=flags)
    config = trained.config
    if not trained.num_classes:
        raise ConfigError(f"{args.run} was trained without labels; there is no class to name")
    channels = dataset_channels(config)
    real = build_dataset(config.dataset, split="train", input_channels=channels)
    held_out = build_dataset(config.dataset, split="validation", input_channels=channels)

    with report_progress("reading real images"):
        images, class_labels = as_tensors(real)
        images = trained.real_to_pixels(images)
        held_out_images, held_out_labels = as_tensors(held_out)
        held_out_images = trained.real_to_pixels(held_out_images)
    num_classes = len(real.class_names)
    with report_progress("training the classifier", total=args.epochs, unit="epochs") as advance:
        classifier = train_classifier(
            images, class_labels, num_classes=num_classes, epochs=args.epochs, seed=args.seed, advance=advance
        )

    labels = list(range(trained.num_classes))
    samples = trained.generate(
        labels, samples_per_label=args.samples_per_class, seed=args.seed, batch_size=250
    )  # (classes, n, C, H, W)
    wanted = [label for label in labels for _ in range(args.samples_per_class)]
    with report_progress("classifying samples"):
        pictures = trained.to_pixels(samples).clamp(-1, 1)
        per_class = [
            accuracy(classifier, row, row.new_full((len(row),), label).long()) for label, row in enumerate(pictures)
        ]
    result = {
        "run": str(args.run),
        "step": trained.step,
        "guidance_scale": config.sampling.guidance_scale,
        "num_samples": len(wanted),
        "accuracy_generated": sum(per_class) / len(per_class),
        "accuracy_held_out_real": accuracy(classifier, held_out_images, held_out_labels),
        "chance": 1 / trained.num_classes,
        "per_class": dict(zip(real.class_names, per_class, strict=True)),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
