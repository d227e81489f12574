# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Metrics of a run's guided samples against real images, with a card that repeats them (docs/evaluation.md).

torchditan evaluate outputs/quickstart
torchditan evaluate outputs/imagenet --metrics inception --num_samples 50000 --reference VIRTUAL_imagenet256.npz
torchditan evaluate --images samples.npz --reference reference.npz --metrics inception
torchditan evaluate --card outputs/quickstart/evaluation/.../card.json
torchditan evaluate outputs/scenes --metrics prompts
torchrun --nproc_per_node 8 -m torchditan evaluate outputs/imagenet --num_samples 50000
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

if TYPE_CHECKING:
    from torchditan.config.command_line import RunParser
    from torchditan.distributed.process_group import Rank
    from torchditan.evaluation.card import Card, Origin
    from torchditan.evaluation.evaluator import Evaluator, RealImages
    from torchditan.evaluation.metric import Pictures, Source, ToPixels
    from torchditan.evaluation.sample_parts import SampleParts
    from torchditan.weights.trained_model import TrainedModel

DEFAULT_METRICS = ("effnet", "classifier")
"""Those that the run and the number of samples allow."""
NUM_SAMPLES = 2600
"""More than twice the 1,280 features of EfficientNet-Lite0, so that both halves have a full-rank covariance."""
NUM_OF_PROMPTS = 400
"""Samples by default if prompts are judged, half of them of each kind."""
OF_SAMPLES = (
    *("samples_per_class", "num_samples", "step", "weights", "class_balance", "save_images", "rounding", "seeds"),
    *("float32_matmul_precision", "prompts"),
)
"""Options without effect on the images of a file."""
MAX_CLASSIFIER_VALUES = 1 << 30
"""Values of the training images with which the classifier is computed by default: 1 GiB of them."""
TIMEOUT_S = 6 * 3600
"""Rank 0 compares features while the others wait."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this command, and the remaining flags for the run's configuration. Imports no torch.

    Raises:
        ConfigError: an option is wrong, or has no effect together with another one.
    """
    from torchditan.config.command_line import RunParser, add_float32_matmul_precision, count
    from torchditan.registry import METRICS

    parser = RunParser(__doc__, is_run_required=False)
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help=f"what to compute, any of {', '.join(METRICS)} (default: {' and '.join(DEFAULT_METRICS)}, if possible)",
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        help="texts to draw in turn, or @FILE (default: those of the metric prompts, or training captions)",
    )
    samples = parser.add_mutually_exclusive_group()
    samples.add_argument(
        "--num_samples", type=count, help=f"samples of each seed (default: {NUM_SAMPLES}, or fewer for a small dataset)"
    )
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
    parser.add_argument(
        "--out", type=Path, help="folder of the card (default: in evaluation/ of the run, or outputs/NAME)"
    )
    parser.add_argument("--save_images", action="store_true", help="write the samples as samples.npz, as ADM's scripts")
    parser.add_argument(
        "--save_reference",
        type=Path,
        metavar="FILE.npz",
        help="write the training images and their statistics",
    )
    parser.add_argument("--card", type=Path, help="repeat the evaluation of this card, and say what differs")
    args, flags = parser.parse(argv)
    check(args, flags, parser)
    args.class_balance = "balanced" if args.samples_per_class is not None else args.class_balance or "data"
    return args, flags


def check(args: argparse.Namespace, flags: list[str], parser: RunParser) -> None:
    from torchditan.config.command_line import RUN_EXAMPLES, check_output
    from torchditan.config.errors import ConfigError, did_you_mean, option_error
    from torchditan.registry import METRICS, entry_name

    for name in args.metrics or ():
        if METRICS.place(entry_name(name)) is None:
            hint = f"; put the run first: torchditan evaluate {name} --metrics ..." if Path(name).is_dir() else ""
            right = f"must be one of {', '.join(METRICS)}, or module:name{hint or did_you_mean(name, METRICS)}"
            raise option_error("--metrics", name, right)
    if args.run is None and args.images is None and args.card is None:
        raise ConfigError(f"the following arguments are required: run, {RUN_EXAMPLES}")
    if args.without_data and args.reference is None:
        raise option_error("--without_data", True, "needs a --reference to compare with")
    if args.run is None and args.images is not None and args.reference is None:
        raise option_error("--reference", None, "must be given with --images, or give the run whose data is compared")
    if args.samples_per_class is not None and args.class_balance not in (None, "balanced"):
        raise option_error("--class_balance", args.class_balance, "--samples_per_class needs balanced")
    for option in OF_SAMPLES if args.images is not None else ():
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


def note(text: str) -> None:
    """One line on stderr, of rank 0."""
    from torchditan.distributed.process_group import Rank

    if Rank.from_environment().rank == 0:
        print(text, file=sys.stderr)


def open_run(args: argparse.Namespace, flags: list[str], rank: Rank) -> TrainedModel:
    from torchditan.config.errors import option_error
    from torchditan.config.prompts import read_prompts
    from torchditan.run.progress import report_progress
    from torchditan.weights.trained_model import TrainedModel

    with report_progress(f"loading {args.run}"):
        trained = TrainedModel.open(args.run, step=args.step, weights=args.weights, device=rank.device, flags=flags)
    if args.prompts is not None and not trained.takes_prompts:
        raise option_error("--prompts", args.prompts, "this run was not trained on captions; leave it out")
    if trained.takes_prompts and args.samples_per_class is not None:
        right = "has no effect on samples of captions; leave it out, or give --num_samples"
        raise option_error("--samples_per_class", args.samples_per_class, right)
    if trained.takes_prompts and args.reference is not None and is_judged_by_prompts(args, trained):
        right = "has no effect on samples that are compared with their prompts; leave it out"
        raise option_error("--reference", str(args.reference), right)
    if args.prompts is not None:
        args.prompts = read_prompts("--prompts", args.prompts)
    return trained


def open_real_images(args: argparse.Namespace, trained: TrainedModel | None, decode: ToPixels) -> RealImages:
    """Training and held-out images of the run; none for metrics of prompts, or if they are not needed and not there.

    Raises:
        ConfigError: they cannot be read, or a model of captions does not draw such pictures.
    """
    from torchditan.config.errors import ConfigError
    from torchditan.config.options import cache_folder, dataset_channels
    from torchditan.datasets import build_dataset
    from torchditan.evaluation.evaluator import RealImages

    if trained is None or args.without_data or (trained.takes_prompts and is_judged_by_prompts(args, trained)):
        return RealImages({}, to_pixels=decode, has_labels=False)
    if trained.takes_prompts:
        check_pictures_of_captions(args, trained)
    config, channels = trained.config, dataset_channels(trained.config)
    splits: dict[Source, Any] = {"train": "train", "held_out": "validation"}
    try:
        datasets = {
            source: build_dataset(
                config.dataset, split=split, input_channels=channels, cache_folder=cache_folder(config)
            )
            for source, split in splits.items()
        }
    except ConfigError as error:
        if args.reference is None:
            raise
        note(f"no copy check and no held-out figures: {error}")
        datasets = {}
    return RealImages(
        datasets,
        to_pixels=trained.real_to_pixels if config.autoencoder.online else decode,
        has_labels=trained.num_classes > 0,
        corrupt_images=config.dataset.corrupt_images,
    )


def is_judged_by_prompts(args: argparse.Namespace, trained: TrainedModel) -> bool:
    from torchditan.evaluation import evaluator

    return evaluator.is_judged_by_prompts(args.metrics or [], trained.config.dataset.dataset_name)


def check_pictures_of_captions(args: argparse.Namespace, trained: TrainedModel) -> None:
    """Refuse models of captions whose samples are not pictures of one size, as the dataset has them."""
    from torchditan.config.errors import ConfigError
    from torchditan.registry import FAMILIES

    config = trained.config
    if config.model.name in FAMILIES or trained.is_latent or config.dataset.aspect_buckets:
        right = "must be a run of model.name dit on pixels of one size; others are compared during training"
        raise ConfigError(f"{args.run} was trained on captions; {right} (docs/finetune.md, Validation)")


class Subject:
    """What is evaluated: samples of a run, drawn with each seed, or the images of a file."""

    def __init__(
        self, args: argparse.Namespace, trained: TrainedModel | None, decode: ToPixels, real: RealImages, rank: Rank
    ) -> None:
        from torchditan.evaluation.card import CARD_FILE
        from torchditan.evaluation.sample_batches import image_shape

        self.args, self.trained, self.decode, self.rank = args, trained, decode, rank
        self.num_training = len(real.datasets.get("train", ()))
        self.num_classes = 0
        if args.images is not None:
            self.num_images, *size = image_shape(args.images)
            self.image_size = (size[0], size[1])
            self.seeds = [args.seed]
        else:
            assert trained is not None
            self.num_classes = trained.num_classes
            self.image_size = trained.image_size
            default = self.num_training if self.has_few_real_images else NUM_SAMPLES
            is_judged = trained.takes_prompts and is_judged_by_prompts(args, trained)
            self.num_images = args.num_samples or (NUM_OF_PROMPTS if is_judged else default)
            if args.samples_per_class is not None:
                self.num_images = args.samples_per_class * max(1, self.num_classes)
            self.seeds = list(range(args.seed, args.seed + args.seeds))
        self.parts: dict[int, SampleParts] = {}
        """The finished samples of each seed."""
        self.folder = args.out or self._default_folder()
        if args.card is not None and args.out is None:  # the card that is repeated stays as it is
            numbered = (self.folder.with_name(f"{self.folder.name}_repeat-{number}") for number in itertools.count(1))
            self.folder = next(folder for folder in numbered if not (folder / CARD_FILE).exists())

    @property
    def has_few_real_images(self) -> bool:
        """Too few training images for a Fréchet distance over EfficientNet-Lite0."""
        from torchditan.evaluation.efficientnet_lite import NUM_FEATURES

        return self.args.reference is None and 0 < self.num_training <= NUM_FEATURES

    def pictures(self, seed: int, evaluator: Evaluator) -> Iterator[Pictures]:
        """This rank's part."""
        from torchditan.evaluation.drawing import draw_pictures, plan_prompts, plan_samples
        from torchditan.evaluation.sample_parts import SampleParts

        args, trained = self.args, self.trained
        if args.images is not None:
            return self._pictures_of_file()
        assert trained is not None
        if trained.takes_prompts:
            prompts = evaluator.prompts(args.prompts or [], num_samples=self.num_images)
            plan = plan_prompts(self.num_images, prompts, trained.encode_prompts(prompts))
        else:
            plan = plan_samples(
                self.num_images,
                num_classes=self.num_classes,
                class_balance=args.class_balance,
                class_counts=evaluator.class_counts,
                seed=seed,
            )
        self.parts[seed] = SampleParts(self.folder / "parts", plan, seed=seed, settings=self._settings())
        return draw_pictures(
            trained.sampler,
            trained.model,
            plan,
            seed=seed,
            batch_size=args.batch_size,
            to_pixels=self.decode,
            rounding=args.rounding,
            parts=self.parts[seed],
        )

    def _pictures_of_file(self) -> Iterator[Pictures]:
        import torch

        from torchditan.evaluation.metric import Pictures
        from torchditan.evaluation.sample_batches import read_images

        batch_size = self.args.batch_size
        for batch, images in enumerate(read_images(self.args.images, batch_size=batch_size)):
            if batch % self.rank.world_size == self.rank.rank:
                numbers = torch.arange(batch * batch_size, batch * batch_size + len(images))
                yield Pictures(images, None, numbers, "generated")

    def _settings(self) -> dict[str, Any]:
        """All that determines the samples but their seed."""
        from torchditan.evaluation.card import sampling_settings

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
            "class_balance": args.class_balance if self.num_classes else None,
            "rounding": args.rounding,
            "device": self.rank.device.type,
            "float32_matmul_precision": args.float32_matmul_precision,
        }

    def _default_folder(self) -> Path:
        """Says what is evaluated, and ends in a hash of all settings: no two evaluations share a folder."""
        args, trained = self.args, self.trained
        reference = None if args.reference is None else str(args.reference.resolve())
        shared = [args.metrics, reference, args.epochs, *([args.prompts] if args.prompts else [])]
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
        return trained.folder / "evaluation" / "_".join([*words, f"{self.num_images}-samples", number])


def choose_metrics(subject: Subject) -> list[str]:
    """`--metrics`, or the default ones that can be computed; one line names the others."""
    from torchditan.config.errors import ConfigError
    from torchditan.config.optional_libraries import how_to_install
    from torchditan.evaluation.efficientnet_lite import NUM_FEATURES, PACKAGE

    if subject.args.metrics is not None:
        return subject.args.metrics
    trained = subject.trained
    if trained is not None and trained.takes_prompts and is_judged_by_prompts(subject.args, trained):
        return ["prompts"]
    has_effnet = importlib.util.find_spec(PACKAGE) is not None
    if has_effnet and subject.has_few_real_images:
        note(
            f"{subject.num_images:,} samples for copies, KID and precision. No Fréchet distance and no classifier: for "
            f"these, {subject.num_training:,} training images are too few; they need more than {NUM_FEATURES:,}"
        )
        return ["effnet"]
    missing = {}
    num_values = 3 * subject.image_size[0] * subject.image_size[1]
    if not subject.num_classes or not subject.num_training:
        missing["classifier"] = "needs a model of classes and its training images"
    elif subject.num_training * num_values > MAX_CLASSIFIER_VALUES:
        missing["classifier"] = "would keep all training images in memory; ask for it with --metrics"
    if not has_effnet:
        missing["effnet"] = f"needs {how_to_install('evaluation')}"
    elif subject.num_images <= NUM_FEATURES:
        missing["effnet"] = f"needs more than {NUM_FEATURES} samples, not {subject.num_images}"
    for name, why in missing.items():
        note(f"without {name}, which {why}")
    chosen = [name for name in DEFAULT_METRICS if name not in missing]
    if not chosen:
        raise ConfigError("--metrics: nothing can be computed by default; see the lines above")
    return chosen


def _name_of_samples(args: argparse.Namespace) -> str:
    if args.images is not None:
        return str(args.images)
    per_class = args.samples_per_class
    return "--num_samples" if per_class is None else f"--samples_per_class {per_class}"


def build_evaluator(subject: Subject, names: list[str], real: RealImages) -> Evaluator:
    """The metrics of this rank. Without a run, features of real images are not cached."""
    from torchditan.config.errors import option_error
    from torchditan.distributed.precision import float64_device
    from torchditan.evaluation.evaluator import Evaluator, feature_cache_folder
    from torchditan.evaluation.metric import Evaluation
    from torchditan.evaluation.quality import Quality

    args, trained = subject.args, subject.trained
    class_names = trained.class_names if trained is not None else []
    if real.has_labels and "train" in real.datasets:
        class_names = real.datasets["train"].class_names
    evaluation = Evaluation(
        class_names=class_names,
        seed=args.seed,
        epochs=args.epochs,
        device=str(float64_device(subject.rank.device)),
        cache_folder=None if trained is None else feature_cache_folder(trained.config),
        inception_weights=args.inception_weights,
        reference=args.reference,
        samples_name=_name_of_samples(args),
    )
    unlabelled = f"{args.run} was trained without labels; leave it out"
    if args.images is not None:
        unlabelled = "needs samples of known classes; leave it out"
    evaluator = Evaluator(
        names,
        evaluation,
        real,
        num_samples=subject.num_images,
        image_size=subject.image_size,
        without_labels=None if subject.num_classes else unlabelled,
        prompts_of=trained.config.dataset.dataset_name if trained is not None and trained.takes_prompts else None,
    )
    if args.save_reference is not None and not any(isinstance(metric, Quality) for metric in evaluator.metrics):
        raise option_error("--save_reference", str(args.save_reference), "needs --metrics effnet or inception")
    return evaluator


def evaluate(args: argparse.Namespace, flags: list[str], rank: Rank, repeated: Card | None) -> Card | None:
    """Evaluate and write the card; on other ranks than 0, None."""
    from torchditan.evaluation.card import Card, ImageSet, card_figures, environment_of
    from torchditan.evaluation.card_tables import check_repeatable
    from torchditan.run.atomic_files import sha256_of

    started = time.perf_counter()
    trained = open_run(args, flags, rank) if args.run is not None else None
    decode = trained.open_decoder() if trained is not None else lambda samples: samples  # before the slow work
    real = open_real_images(args, trained, decode)
    subject = Subject(args, trained, decode, real, rank)
    names = choose_metrics(subject)
    origin = origin_of(args, trained)
    if repeated is not None:
        check_repeatable(args.card, repeated, origin)
    evaluator = build_evaluator(subject, names, real)
    evaluator.read_real_images()
    is_decoded = trained is not None and trained.is_latent and not trained.config.autoencoder.online
    sets = {
        source: ImageSet(source=source, num_images=shown.num_images, content=shown.content, is_decoded=is_decoded)
        for source, shown in evaluator.shown.items()
        if source != "generated"
    }
    reference = sets.get("train")
    if args.reference is not None:
        reference = ImageSet(source="file", path=str(args.reference), content=sha256_of(args.reference))
    if repeated is not None:
        check_repeatable(args.card, repeated, origin, reference=reference)
    if args.save_reference is not None and rank.rank == 0:
        save_reference(args.save_reference, evaluator, image_size=subject.image_size)

    results, samples, seconds = [], [], {"reading": time.perf_counter() - started, "drawing": 0.0, "comparing": 0.0}
    for seed in subject.seeds:
        start = time.perf_counter()
        samples.append(evaluator.show(subject.pictures(seed, evaluator)).content)
        drawn = time.perf_counter()
        results.append(evaluator.compute())
        seconds["drawing"] += drawn - start
        seconds["comparing"] += time.perf_counter() - drawn
    if rank.rank > 0:
        return None
    figures, other = card_figures(results, num_images=subject.num_images)
    is_run = args.images is None
    is_of_classes = trained is not None and not trained.takes_prompts
    card = Card(
        **vars(origin),
        **environment_of(rank.device),
        seeds=subject.seeds,
        num_samples=subject.num_images,
        class_balance=args.class_balance if is_run and is_of_classes else None,
        prompts=args.prompts or [],
        rounding=args.rounding if is_run else None,
        batch_size=args.batch_size if is_run else None,
        ranks=rank.world_size,
        metrics=names,
        epochs=args.epochs,
        reference=reference,
        reference_run=None if is_run or args.run is None else str(args.run),
        held_out=sets.get("held_out"),
        extractors={name: sha256 for metric in evaluator.metrics for name, sha256 in metric.extractors.items()},
        inception_weights=None if args.inception_weights is None else str(args.inception_weights),
        figures=figures,
        samples=samples,
        other=other,
        seconds=seconds,
    )
    finish(subject, card)
    return card


def finish(subject: Subject, card: Card) -> None:
    """Write the card, and the samples if they were asked for; then remove the parts."""
    from torchditan.evaluation.card import CARD_FILE
    from torchditan.evaluation.card_tables import write_card

    if subject.args.save_images:
        for seed, parts in subject.parts.items():
            parts.write_npz(subject.folder / ("samples.npz" if len(subject.seeds) == 1 else f"samples_seed-{seed}.npz"))
    write_card(subject.folder, card)
    for parts in subject.parts.values():
        parts.remove()
    print(f"card: {subject.folder / CARD_FILE}", file=sys.stderr)


def save_reference(path: Path, evaluator: Evaluator, *, image_size: tuple[int, int]) -> None:
    """Write the training images, and statistics of the first extractor's features. Only rank 0 has them all."""
    from torchditan.evaluation.quality import Quality
    from torchditan.evaluation.sample_batches import write_reference

    metric = next(metric for metric in evaluator.metrics if isinstance(metric, Quality))
    pool, spatial = metric.reference_statistics()
    images = (
        pictures.images.expand(-1, 3, -1, -1) for pictures in evaluator.real.pictures("train", rank=0, world_size=1)
    )
    shape = (evaluator.shown["train"].num_images, *image_size)
    write_reference(path, images, shape=shape, pool=pool, spatial=spatial, extractor=metric.extractor.name)
    note(f"reference: {path}")


def origin_of(args: argparse.Namespace, trained: TrainedModel | None) -> Origin:
    """The part of the card about the checkpoint, or the file of images."""
    from torchditan.evaluation.card import ImageSet, Origin, origin_of_run
    from torchditan.run.atomic_files import sha256_of

    if args.images is not None:
        return Origin(images=ImageSet(source="file", path=str(args.images), content=sha256_of(args.images)))
    assert trained is not None
    return origin_of_run(
        args.run,
        trained.config,
        trained.content,
        step=trained.step,
        images_seen=trained.images_seen,
        weights=trained.weights,
        model_parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        model_evaluations=trained.sampler.evaluations_per_sample(),
    )


def report(card: Card, repeated: Card | None) -> None:
    """The table on stdout, why a figure is missing, and what differs from the card that is repeated."""
    from torchditan.evaluation.card_tables import differences, table

    print(table(card))
    for name, reason in card.other.items():
        if isinstance(reason, str):
            print(f"{name}: {reason}")
    if repeated is not None:
        print("\n".join(differences(repeated, card)))


def main() -> None:
    from torchditan.config.command_line import check_run
    from torchditan.evaluation.card import arguments_of, read_card
    from torchditan.weights.shared import is_shared

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
    if args.run is not None and not is_shared(args.run):
        check_run(args.run)

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
