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
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from torchditan.data_stream.datasets import ImageDataset
    from torchditan.distributed.process_group import Rank
    from torchditan.evaluation.card import Card
    from torchditan.evaluation.evaluator import Shown
    from torchditan.evaluation.metric import Metric, Pictures, Source
    from torchditan.weights.trained_model import TrainedModel

MAX_CLASSIFIER_VALUES = 1 << 30
"""Values of the training images with which the classifier is computed by default: 1 GiB of them."""
TIMEOUT_S = 6 * 3600
"""Rank 0 compares features while the others wait."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this script, and the remaining flags for the run's configuration."""
    from torchditan.evaluation.arguments import parse_arguments

    return parse_arguments(argv, description=__doc__)


def load(args: argparse.Namespace, flags: list[str], rank: Rank) -> TrainedModel:
    from torchditan.config.errors import ConfigError
    from torchditan.run.progress import report_progress
    from torchditan.weights.trained_model import TrainedModel

    with report_progress(f"loading {args.run}"):
        trained = TrainedModel.load(args.run, step=args.step, weights=args.weights, device=rank.device, flags=flags)
        trained.open_decoder()  # refuses a missing one before the slow work
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
    if args.without_data:
        return {}
    try:
        return {
            "train": build_dataset(config, split="train", input_channels=channels),
            "held_out": build_dataset(config, split="validation", input_channels=channels),
        }
    except ConfigError as error:
        if args.reference is None:
            raise
        note(f"no copy check and no held-out figures: {error}")
        return {}


def note(text: str) -> None:
    """One line on stderr, of rank 0."""
    from torchditan.distributed.process_group import Rank

    if Rank.from_environment().rank == 0:
        print(text, file=sys.stderr)


def choose_metrics(
    args: argparse.Namespace, *, num_classes: int, num_samples: int, num_training: int, num_values: int
) -> list[str]:
    """`--metrics`, or the default ones that can be computed; one line names the others."""
    from torchditan.config.errors import ConfigError
    from torchditan.evaluation.arguments import DEFAULT_METRICS
    from torchditan.evaluation.efficientnet_lite import NUM_FEATURES, PACKAGE

    if args.metrics is not None:
        return args.metrics
    missing = {}
    if importlib.util.find_spec(PACKAGE) is None:
        missing["effnet"] = "needs pip install -e '.[evaluation]'"
    elif num_samples <= NUM_FEATURES:
        missing["effnet"] = f"needs more than {NUM_FEATURES} samples, not {num_samples}"
    elif args.reference is None and num_training <= NUM_FEATURES:
        missing["effnet"] = f"needs more than {NUM_FEATURES} training images, not {num_training}, or a --reference"
    if not num_classes or not num_training:
        missing["classifier"] = "needs a model of classes and its training images"
    elif num_training * num_values > MAX_CLASSIFIER_VALUES:
        missing["classifier"] = "would keep all training images in memory; ask for it with --metrics"
    for name, why in missing.items():
        note(f"without {name}, which {why}")
    chosen = [name for name in DEFAULT_METRICS if name not in missing]
    if not chosen:
        raise ConfigError("--metrics: nothing can be computed by default; see the lines above")
    return chosen


def build_metrics(
    args: argparse.Namespace,
    names: list[str],
    trained: TrainedModel | None,
    datasets: dict[Source, ImageDataset],
    rank: Rank,
) -> list[Metric]:
    """The metrics of this rank. Without a run, features of real images are not cached."""
    from torchditan.config.errors import option_error
    from torchditan.evaluation.evaluator import feature_cache_folder
    from torchditan.evaluation.metric import Evaluation
    from torchditan.evaluation.quality import Quality
    from torchditan.registry import METRICS, registered

    classes = [registered(METRICS, name) for name in names]
    num_classes = trained.num_classes if trained is not None else 0
    for name, cls in zip(names, classes, strict=True):
        if cls.needs_labels and (not num_classes or args.images is not None):
            right = "needs samples of known classes; leave it out" if trained is None or args.images else None
            raise option_error("--metrics", name, right or f"{args.run} was trained without labels; leave it out")
    if args.save_reference is not None and not any(issubclass(cls, Quality) for cls in classes):
        raise option_error("--save_reference", str(args.save_reference), "needs --metrics effnet or inception")
    class_names = trained.class_names if trained is not None else []
    if num_classes and "train" in datasets:
        class_names = datasets["train"].class_names
    evaluation = Evaluation(
        class_names=class_names,
        seed=args.seed,
        epochs=args.epochs,
        device=str(rank.device),
        cache_folder=None if trained is None else feature_cache_folder(trained.config),
        inception_weights=args.inception_weights,
        reference=args.reference,
    )
    return [cls(evaluation) for cls in classes]


class Subject:
    """What is evaluated: samples of a run, drawn with each seed, or the images of a file."""

    def __init__(self, args: argparse.Namespace, trained: TrainedModel | None, rank: Rank) -> None:
        from torchditan.evaluation.arguments import NUM_SAMPLES
        from torchditan.evaluation.card import CARD_FILE
        from torchditan.evaluation.sample_batches import image_shape

        self.args, self.trained, self.rank = args, trained, rank
        if args.images is not None:
            self.num_images, height, width = image_shape(args.images)
            self.image_size = (height, width)
            self.seeds = [args.seed]
        else:
            assert trained is not None
            num_classes = trained.num_classes
            per_class = args.samples_per_class
            wanted = NUM_SAMPLES if args.num_samples is None else args.num_samples
            self.num_images = wanted if per_class is None else per_class * max(1, num_classes)
            height, width = trained.image_size
            self.image_size = (height, width)
            self.seeds = list(range(args.seed, args.seed + args.seeds))
        self.folder = args.out or self._default_folder()
        if args.card is not None and args.out is None:  # the card that is repeated stays as it is
            numbered = (self.folder.with_name(f"{self.folder.name}_repeat-{number}") for number in itertools.count(1))
            self.folder = next(folder for folder in numbered if not (folder / CARD_FILE).exists())

    def pictures(self, seed: int, *, class_counts: list[int] | None) -> Iterator[Pictures]:
        """This rank's part."""
        from torchditan.evaluation.drawing import plan_samples

        args, trained = self.args, self.trained
        if args.images is not None:
            return self._pictures_of_file()
        assert trained is not None
        plan = plan_samples(
            self.num_images,
            num_classes=trained.num_classes,
            class_balance=args.class_balance,
            class_counts=class_counts,
            seed=seed,
        )
        parts = self.parts(seed)
        return trained.draw_samples(plan, seed=seed, batch_size=args.batch_size, rounding=args.rounding, parts=parts)

    def _pictures_of_file(self) -> Iterator[Pictures]:
        import torch

        from torchditan.evaluation.metric import Pictures
        from torchditan.evaluation.sample_batches import read_images

        batch_size = self.args.batch_size
        for batch, images in enumerate(read_images(self.args.images, batch_size=batch_size)):
            if batch % self.rank.world_size == self.rank.rank:
                numbers = torch.arange(batch * batch_size, batch * batch_size + len(images))
                yield Pictures(images, None, numbers, "generated")

    def parts(self, seed: int) -> Any:
        """The finished samples of a seed."""
        from torchditan.evaluation.sample_parts import SampleParts

        return SampleParts(self.folder / "parts" / f"seed-{seed}", {**self._settings(), "seed": seed})

    def _settings(self) -> dict[str, Any]:
        """All that determines the samples but their seed."""
        from torchditan.evaluation.card_origin import sampling_settings

        args, trained = self.args, self.trained
        assert trained is not None
        return {
            "run_id": trained.run_id,
            "step": trained.step,
            "weights": trained.weights,
            "sampling": sampling_settings(trained.config.sampling),
            "autoencoder": asdict(trained.config.autoencoder),
            "model": trained.config.model.path,
            "num_samples": self.num_images,
            "class_balance": args.class_balance if trained.num_classes else None,
            "rounding": args.rounding,
            "device": self.rank.device.type,
            **({"float32_matmul_precision": low} if (low := args.float32_matmul_precision) != "highest" else {}),
        }

    def _default_folder(self) -> Path:
        """Says what is evaluated, and ends in a hash of all settings: no two evaluations share a folder."""
        args, trained = self.args, self.trained
        reference = None if args.reference is None else str(args.reference.resolve())
        shared = [args.metrics, reference, args.epochs]
        if args.images is not None:
            run = None if args.run is None else str(args.run.resolve())
            number = hashlib.sha256(json.dumps([*shared, run]).encode()).hexdigest()[:6]
            return args.images.with_name(f"{args.images.stem}_evaluation_{number}")
        assert trained is not None
        sampling = trained.config.sampling
        words = [f"step-{trained.step}", trained.weights, f"{sampling.sampler}-{sampling.num_steps}"]
        words += [f"guidance-{sampling.guidance_scale:g}", f"seed-{args.seed}"]
        words += [f"{args.seeds}-seeds"] if args.seeds > 1 else []
        settings = json.dumps([self._settings(), *shared], default=str)
        number = hashlib.sha256(settings.encode()).hexdigest()[:6]
        return args.run / "evaluation" / "_".join([*words, f"{self.num_images}-samples", number])


def show_real_images(
    metrics: list[Metric], trained: TrainedModel | None, datasets: dict[Source, ImageDataset]
) -> dict[Source, Shown]:
    """Show this rank's part of all real images to its metrics."""
    from torchditan.evaluation.evaluator import real_pictures, show

    real: dict[Source, Shown] = {}
    for source, dataset in datasets.items():
        assert trained is not None
        pictures = real_pictures(
            dataset,
            source,
            to_pixels=real_to_pixels(trained),
            has_labels=trained.num_classes > 0,
            corrupt_images=trained.config.dataset.corrupt_images,
        )
        real[source] = show(metrics, pictures, source)
    return real


def evaluate(args: argparse.Namespace, flags: list[str], rank: Rank, repeated: Card | None) -> Card | None:
    """Evaluate and write the card; on other ranks than 0, None."""
    from torchditan.evaluation.card import ImageSet
    from torchditan.evaluation.card_comparison import check_repeatable
    from torchditan.evaluation.card_figures import card_figures
    from torchditan.evaluation.card_origin import image_set
    from torchditan.evaluation.evaluator import compute, show
    from torchditan.evaluation.extractor_weights import sha256_of

    started = time.perf_counter()
    trained = load(args, flags, rank) if args.run is not None else None
    subject = Subject(args, trained, rank)
    num_classes = trained.num_classes if trained is not None and args.images is None else 0
    datasets = open_datasets(trained, args)
    names = choose_metrics(
        args,
        num_classes=num_classes,
        num_samples=subject.num_images,
        num_training=len(datasets.get("train", ())),
        num_values=3 * subject.image_size[0] * subject.image_size[1],
    )
    origin = origin_of(args, trained)
    if repeated is not None:
        check_repeatable(args.card, repeated, origin)
    metrics = build_metrics(args, names, trained, datasets, rank)
    counts: dict[Source, int] = {"train": 0, "held_out": 0, "generated": subject.num_images}
    counts |= {source: len(dataset) for source, dataset in datasets.items()}
    for metric in metrics:
        metric.check(counts, image_size=subject.image_size)

    real = show_real_images(metrics, trained, datasets)
    is_decoded = trained is not None and trained.is_latent and not trained.config.autoencoder.online
    held_out = image_set("held_out", real.get("held_out"), is_decoded=is_decoded)
    reference = image_set("train", real.get("train"), is_decoded=is_decoded)
    if args.reference is not None:
        reference = ImageSet(source="file", path=str(args.reference), content=sha256_of(args.reference))
    assert reference is not None
    if repeated is not None:
        check_repeatable(args.card, repeated, origin, reference=reference)

    results, samples, seconds = [], [], {"reading": time.perf_counter() - started, "drawing": 0.0, "comparing": 0.0}
    class_counts = real["train"].class_counts if "train" in real else None
    if args.save_reference is not None and rank.rank == 0:
        assert trained is not None
        save_reference(args.save_reference, metrics, datasets["train"], trained, num_images=real["train"].num_images)
    for seed in subject.seeds:
        start = time.perf_counter()
        shown = show(metrics, subject.pictures(seed, class_counts=class_counts), "generated")
        samples.append(shown.content)
        seconds["drawing"] += time.perf_counter() - start
        start = time.perf_counter()
        results.append(compute(metrics))
        seconds["comparing"] += time.perf_counter() - start
        for metric in metrics:
            metric.forget("generated")
    if rank.rank > 0:
        return None
    figures, other = card_figures(results, num_images=subject.num_images)
    card = make_card(
        args,
        origin,
        rank=rank,
        seeds=subject.seeds,
        num_samples=subject.num_images,
        metrics=names,
        reference=reference,
        held_out=held_out,
        extractors={name: sha256 for metric in metrics for name, sha256 in metric.extractors.items()},
        figures=figures,
        samples=samples,
        other=other,
        seconds=seconds,
    )
    finish(subject, card)
    print(f"card: {subject.folder / 'card.json'}", file=sys.stderr)
    return card


def real_to_pixels(trained: TrainedModel) -> Any:
    """Decodes samples of the dataset."""
    return trained.real_to_pixels if trained.config.autoencoder.online else trained.open_decoder()


def finish(subject: Subject, card: Card) -> None:
    """Write the card, and the samples if they were asked for; then remove the parts."""
    from torchditan.evaluation.card_tables import write_card

    if subject.args.save_images:
        for seed in subject.seeds:
            name = "samples.npz" if len(subject.seeds) == 1 else f"samples_seed-{seed}.npz"
            subject.parts(seed).write_npz(subject.folder / name, num_samples=subject.num_images)
    write_card(subject.folder, card)
    for seed in subject.seeds if subject.args.images is None else ():
        subject.parts(seed).remove()


def save_reference(
    path: Path, metrics: list[Metric], dataset: ImageDataset, trained: TrainedModel, *, num_images: int
) -> None:
    """Write the training images, and statistics of the first extractor's features, which rank 0 has."""
    from torchditan.evaluation.evaluator import pictures_of
    from torchditan.evaluation.quality import Quality
    from torchditan.evaluation.sample_batches import write_reference

    metric = next(metric for metric in metrics if isinstance(metric, Quality))
    pool, spatial = metric.reference_statistics()
    corrupt_images = trained.config.dataset.corrupt_images
    parts = pictures_of(dataset, real_to_pixels(trained), corrupt_images=corrupt_images)
    images = (part.expand(-1, 3, -1, -1) for part in parts)
    shape = (num_images, *trained.image_size)
    write_reference(path, images, shape=shape, pool=pool, spatial=spatial, extractor=metric.extractor.name)
    note(f"reference: {path}")


def origin_of(args: argparse.Namespace, trained: TrainedModel | None) -> Any:
    """The part of the card about the checkpoint, or the file of images."""
    from torchditan.evaluation.card import ImageSet, Origin
    from torchditan.evaluation.card_origin import evaluations_per_sample, origin_of_run
    from torchditan.evaluation.extractor_weights import sha256_of

    if args.images is not None:
        return Origin(images=ImageSet(source="file", path=str(args.images), content=sha256_of(args.images)))
    assert trained is not None
    config = trained.config
    return origin_of_run(
        args.run,
        config,
        step=trained.step,
        images_seen=trained.images_seen,
        weights=trained.weights,
        model_parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        model_evaluations=evaluations_per_sample(trained.objective, trained.spec, config.sampling),
    )


def make_card(args: argparse.Namespace, origin: Any, *, rank: Rank, **found: Any) -> Card:
    from torchditan.evaluation.card import Card
    from torchditan.evaluation.card_origin import environment_of

    is_run = origin.images is None
    return Card(
        **vars(origin),
        class_balance=args.class_balance if is_run else None,
        rounding=args.rounding if is_run else None,
        batch_size=args.batch_size if is_run else None,
        ranks=rank.world_size,
        epochs=args.epochs,
        inception_weights=None if args.inception_weights is None else str(args.inception_weights),
        reference_run=None if is_run or args.run is None else str(args.run),
        **found,
        **environment_of(rank.device),
    )


def report(card: Card, repeated: Card | None) -> None:
    """The table on stderr, and all values as one JSON object on stdout."""
    from torchditan.evaluation.card_comparison import differences
    from torchditan.evaluation.card_tables import table

    print(table(card), file=sys.stderr)
    if repeated is not None:
        print("\n".join(differences(repeated, card)), file=sys.stderr)
    result = {
        "run": card.run or (card.images and card.images.path),
        "step": card.step,
        "guidance_scale": card.sampling.get("guidance_scale"),
        "num_samples": card.num_samples,
        **{name: figure.value for name, figure in card.figures.items()},
        **card.other,
    }
    print(json.dumps(result, indent=2))


def main() -> None:
    from torchditan.evaluation.card import arguments_of, read_card

    argv = sys.argv[1:]
    args, flags = parse(argv)
    repeated = None
    if args.card is not None:
        repeated = read_card(args.card)
        stored = arguments_of(repeated)
        if args.run is not None and not stored[0].startswith("-"):
            stored = stored[1:]
        if args.num_samples is not None or args.samples_per_class is not None:
            stored = [text for text in stored if not text.startswith(("--num_samples=", "--class_balance="))]
        args, flags = parse([*stored, *argv])

    import torch
    import torch.distributed as dist

    from torchditan.distributed.cpu_threads import configure_cpu
    from torchditan.distributed.process_group import Rank, check_devices, init_process_group
    from torchditan.supervision.exit_status import OutOfMemory, is_out_of_memory

    configure_cpu()
    torch.set_float32_matmul_precision(args.float32_matmul_precision)
    rank = Rank.from_environment()
    check_devices(rank)
    if rank.world_size > 1:
        init_process_group(rank, timeout_seconds=TIMEOUT_S)
    try:
        card = evaluate(args, flags, rank, repeated)
        if card is not None:
            report(card, repeated)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except (MemoryError, RuntimeError, torch.OutOfMemoryError) as error:
        if not is_out_of_memory(error):
            raise
        right = "finished samples are kept; run the same command again, while drawing with a smaller --batch_size"
        raise OutOfMemory(f"out of memory at --batch_size = {args.batch_size}: {right}") from None


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
