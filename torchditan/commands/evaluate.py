# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Metrics of a run's guided samples against real images, with a card that says how to repeat them (docs/evaluation.md).

torchditan evaluate outputs/quickstart
torchditan evaluate outputs/quickstart --sampling.num_steps 10 25 50 --sampling.guidance_scale 1 2 4
torchditan evaluate outputs/imagenet --metrics inception --num_samples 50000 --reference VIRTUAL_imagenet256.npz
torchditan evaluate --images samples.npz --reference reference.npz --metrics inception
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchditan.config.command_line import (
    RUN_EXAMPLES,
    RunParser,
    add_float32_matmul_precision,
    check_output,
    count,
)
from torchditan.config.errors import ConfigError, did_you_mean, option_error
from torchditan.config.loader import override
from torchditan.config.optional_libraries import how_to_install, import_optional
from torchditan.config.options import Sampling, cache_folder, dataset_channels
from torchditan.config.prompts import read_prompts
from torchditan.evaluation.card import (
    CARD_FILE,
    Card,
    ImageSet,
    Origin,
    card_figures,
    environment_of,
    origin_of_run,
    read_card,
    sampling_settings,
)
from torchditan.evaluation.card_tables import table, write_card
from torchditan.registry import FAMILIES, METRICS, entry_name
from torchditan.run.atomic_files import sha256_of
from torchditan.run.progress import report_progress
from torchditan.run.provenance import git_commit
from torchditan.supervision.exit_status import OutOfMemory, is_out_of_memory
from torchditan.weights.shared import check_address

if TYPE_CHECKING:
    from torchditan.data_stream.datasets import ImageDataset
    from torchditan.distributed.process_group import Rank
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
    parser.add_argument("--save_reference", type=Path, help="write the training images and their statistics as .npz")
    args, flags = parser.parse(argv)
    without_effect = [name for name in OF_SAMPLES if getattr(args, name) != parser.get_default(name)]
    check(args, [*(f"--{name}" for name in without_effect), *flags])
    args.class_balance = "balanced" if args.samples_per_class is not None else args.class_balance or "data"
    return args, flags


def check(args: argparse.Namespace, of_samples: Sequence[str]) -> None:
    """Refuse arguments that do not go together. `of_samples`: those given that change only samples of a run."""
    for name in args.metrics or ():
        if METRICS.place(entry_name(name)) is None:
            right = f"must be one of {', '.join(METRICS)}, or module:name{did_you_mean(name, METRICS)}"
            raise option_error("--metrics", name, f"{right}; the run comes before the options")
    if args.run is None and args.images is None:
        raise ConfigError(f"the following arguments are required: run, {RUN_EXAMPLES}")
    if args.without_data and args.reference is None:
        raise option_error("--without_data", True, "needs a --reference to compare with")
    if args.run is None and args.reference is None:
        raise option_error("--reference", None, "must be given with --images, or give the run whose data is compared")
    if args.samples_per_class is not None and args.class_balance not in (None, "balanced"):
        raise option_error("--class_balance", args.class_balance, "--samples_per_class needs balanced")
    if args.images is not None and of_samples:
        raise ConfigError(f"{of_samples[0]} has no effect with --images; leave it out")
    if args.save_reference is not None:
        if args.reference is not None or args.run is None:
            right = "writes the training images of a run, which must be the reference"
            raise option_error("--save_reference", str(args.save_reference), right)
        check_output("--save_reference", args.save_reference)
    if args.out is not None:
        check_output("--out", args.out / CARD_FILE)


def split_flags(flags: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The flags that have one value, and `{"num_steps": ["1", "2"]}`: the options of [sampling] that have several.

    `--sampling.guidance_interval 0.2 0.8` is one value, as elsewhere; several are `0,1 0.2,0.8`.
    """
    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    fixed: list[str] = []
    several: dict[str, list[str]] = {}
    for group in groups:
        option, equals, first = group[0].partition("=")
        name, values = option.removeprefix("--sampling."), [*([first] if equals else []), *group[1:]]
        is_one = len(values) < 2 or (name == "guidance_interval" and not all("," in value for value in values))
        if is_one or option == name or name not in sampling_settings(Sampling()):
            fixed += group
        else:
            several[name] = list(dict.fromkeys(values))
    return fixed, several


def note(text: str) -> None:
    """One line on stderr, of rank 0."""
    from torchditan.distributed.process_group import Rank

    if Rank.from_environment().rank == 0:
        print(text, file=sys.stderr)


def open_run(args: argparse.Namespace, flags: Sequence[str], rank: Rank) -> TrainedModel:
    from torchditan.weights.trained_model import TrainedModel

    with report_progress(f"loading {args.run}"):
        trained = TrainedModel.open(args.run, step=args.step, weights=args.weights, device=rank.device, flags=flags)
    if args.prompts is not None and not trained.takes_prompts:
        raise option_error("--prompts", args.prompts, "this run was not trained on captions; leave it out")
    if trained.takes_prompts and args.samples_per_class is not None:
        right = "has no effect on samples of captions; leave it out, or give --num_samples"
        raise option_error("--samples_per_class", args.samples_per_class, right)
    if args.reference is not None and is_judged_by_prompts(args, trained):
        right = "has no effect on samples that are compared with their prompts; leave it out"
        raise option_error("--reference", str(args.reference), right)
    if args.prompts is not None:
        args.prompts = read_prompts("--prompts", args.prompts)
    return trained


def is_judged_by_prompts(args: argparse.Namespace, trained: TrainedModel | None) -> bool:
    """Whether no real images are needed."""
    from torchditan.evaluation import evaluator

    if trained is None or not trained.takes_prompts:
        return False
    return evaluator.is_judged_by_prompts(args.metrics or [], trained.config.dataset.dataset_name)


def open_real_images(args: argparse.Namespace, trained: TrainedModel | None, decode: ToPixels) -> RealImages:
    """Training and held-out images of the run; none for metrics of prompts, or if they are not needed and not there.

    Raises:
        ConfigError: they cannot be read, or a model of captions does not draw such pictures.
    """
    from torchditan.datasets import build_dataset
    from torchditan.evaluation.evaluator import RealImages

    if trained is None or args.without_data or is_judged_by_prompts(args, trained):
        return RealImages({}, to_pixels=decode, has_labels=False)
    config = trained.config
    is_other = config.model.name in FAMILIES or trained.is_latent or config.dataset.aspect_buckets
    if trained.takes_prompts and is_other:
        right = "must be a run of model.name dit on pixels of one size; others are compared during training"
        raise ConfigError(f"{args.run} was trained on captions; {right} (docs/finetune.md, Validation)")
    places: dict[str, Any] = {"input_channels": dataset_channels(config), "cache_folder": cache_folder(config)}
    datasets: dict[Source, ImageDataset] = {}
    try:
        datasets = {
            "train": build_dataset(config.dataset, split="train", **places),
            "held_out": build_dataset(config.dataset, split="validation", **places),
        }
    except ConfigError as error:
        if args.reference is None:
            raise
        note(f"no copy check and no held-out figures: {error}")
    return RealImages(
        datasets,
        to_pixels=trained.real_to_pixels if config.autoencoder.online else decode,
        has_labels=trained.num_classes > 0,
        corrupt_images=config.dataset.corrupt_images,
    )


@dataclass
class Subject:
    """What is evaluated: samples of a run, drawn with each seed, or the images of a file."""

    args: argparse.Namespace
    trained: TrainedModel | None
    decode: ToPixels
    rank: Rank
    num_training: int
    """Training images that are read."""
    is_one_of_several: bool
    parts: dict[int, SampleParts] = field(default_factory=dict, init=False)
    """The finished samples of each seed."""

    @property
    def num_classes(self) -> int:
        return 0 if self.args.images is not None or self.trained is None else self.trained.num_classes

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Number of images, height and width."""
        from torchditan.evaluation.sample_batches import image_shape

        args = self.args
        if args.images is not None:
            return image_shape(args.images)
        assert self.trained is not None
        number = self.num_training if self.has_few_real_images else NUM_SAMPLES
        if is_judged_by_prompts(args, self.trained):
            number = NUM_OF_PROMPTS
        if args.samples_per_class is not None:
            number = args.samples_per_class * max(1, self.num_classes)
        return args.num_samples or number, *self.trained.image_size

    @property
    def num_images(self) -> int:
        return self.shape[0]

    @property
    def seeds(self) -> list[int]:
        return [self.args.seed + number for number in range(self.args.seeds)]

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

    @cached_property
    def folder(self) -> Path:
        """Of the card. By default it says what is evaluated, and ends in a hash of all settings."""
        args, trained = self.args, self.trained
        if args.out is not None and not self.is_one_of_several:
            return args.out
        reference = None if args.reference is None else str(args.reference.resolve())
        shared = [args.metrics, reference, args.epochs, *([args.prompts] if args.prompts else [])]
        if args.images is not None:
            run = None if args.run is None else str(args.run.resolve())
            return args.images.with_name(f"{args.images.stem}_evaluation_{short_hash([*shared, run])}")
        assert trained is not None
        sampling = trained.config.sampling
        words = [f"step-{trained.step}", trained.weights, f"{sampling.sampler}-{sampling.num_steps}"]
        words += [f"guidance-{sampling.guidance_scale:g}", f"seed-{args.seed}"]
        words += [f"{args.seeds}-seeds"] if args.seeds > 1 else []
        words += [f"{self.num_images}-samples", short_hash([self._settings(), *shared])]
        return (args.out or trained.folder / "evaluation") / "_".join(words)


def short_hash(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:6]


def choose_metrics(subject: Subject) -> list[str]:
    """`--metrics`, or the default ones that can be computed; one line names the others."""
    from torchditan.evaluation.efficientnet_lite import NUM_FEATURES, PACKAGE

    if subject.args.metrics is not None:
        return subject.args.metrics
    if is_judged_by_prompts(subject.args, subject.trained):
        return ["prompts"]
    has_effnet = importlib.util.find_spec(PACKAGE) is not None
    if has_effnet and subject.has_few_real_images:
        note(
            f"{subject.num_images:,} samples for copies, KID and precision. No Fréchet distance and no classifier: for "
            f"these, {subject.num_training:,} training images are too few; they need more than {NUM_FEATURES:,}"
        )
        return ["effnet"]
    missing = {}
    if not subject.num_classes or not subject.num_training:
        missing["classifier"] = "needs a model of classes and its training images"
    elif subject.num_training * 3 * subject.shape[1] * subject.shape[2] > MAX_CLASSIFIER_VALUES:
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


def build_evaluator(subject: Subject, names: list[str], real: RealImages) -> Evaluator:
    """The metrics of this rank. Without a run, features of real images are not cached."""
    from torchditan.distributed.precision import float64_device
    from torchditan.evaluation.evaluator import Evaluator, feature_cache_folder
    from torchditan.evaluation.metric import Evaluation
    from torchditan.evaluation.quality import Quality

    args, trained = subject.args, subject.trained
    class_names = trained.class_names if trained is not None else []
    if real.has_labels and "train" in real.datasets:
        class_names = real.datasets["train"].class_names
    samples_name, unlabelled = "--num_samples", f"{args.run} was trained without labels; leave it out"
    if args.images is not None:
        samples_name, unlabelled = str(args.images), "needs samples of known classes; leave it out"
    elif args.samples_per_class is not None:
        samples_name = f"--samples_per_class {args.samples_per_class}"
    evaluation = Evaluation(
        class_names=class_names,
        seed=args.seed,
        epochs=args.epochs,
        device=str(float64_device(subject.rank.device)),
        cache_folder=None if trained is None else feature_cache_folder(trained.config),
        inception_weights=args.inception_weights,
        reference=args.reference,
        samples_name=samples_name,
    )
    evaluator = Evaluator(
        names,
        evaluation,
        real,
        num_samples=subject.num_images,
        image_size=subject.shape[1:],
        without_labels=None if subject.num_classes else unlabelled,
        prompts_of=trained.config.dataset.dataset_name if trained is not None and trained.takes_prompts else None,
    )
    if args.save_reference is not None and not any(isinstance(metric, Quality) for metric in evaluator.metrics):
        raise option_error("--save_reference", str(args.save_reference), "needs --metrics effnet or inception")
    return evaluator


def evaluate(args: argparse.Namespace, flags: list[str], rank: Rank) -> None:
    """Evaluate each combination of the values, write the cards, and print the figures."""
    from torchditan.distributed.process_group import from_rank_0
    from torchditan.report.sampling_table import write_table

    fixed, several = split_flags(flags)
    points = [dict(zip(several, values, strict=True)) for values in itertools.product(*several.values())]
    given = [[f"--sampling.{name}={value}" for name, value in point.items()] for point in points]
    if several:
        import_optional("matplotlib", extra="evaluation")
    trained = open_run(args, [*fixed, *given[0]], rank) if args.run is not None else None
    decode = trained.open_decoder() if trained is not None else lambda samples: samples  # before the slow work
    real = open_real_images(args, trained, decode)
    first = Subject(args, trained, decode, rank, len(real.datasets.get("train", ())), bool(several))
    subjects = [first]
    for settings in given[1:]:
        assert trained is not None
        config = override(trained.config, settings, sections=("sampling",))
        subjects.append(replace(first, trained=replace(trained, config=config)))
    names = choose_metrics(first)
    evaluator = build_evaluator(first, names, real)
    evaluator.read_real_images()
    is_decoded = trained is not None and trained.is_latent and not trained.config.autoencoder.online
    images: dict[str, ImageSet | None] = {
        source: ImageSet(source=source, num_images=shown.num_images, content=shown.content, is_decoded=is_decoded)
        for source, shown in evaluator.shown.items()
        if source != "generated"
    }
    if args.reference is not None:
        images["train"] = ImageSet(source="file", path=str(args.reference), content=sha256_of(args.reference))
    if args.save_reference is not None and rank.rank == 0:
        save_reference(args.save_reference, evaluator, image_size=first.shape[1:])

    cards = []
    for number, (subject, point) in enumerate(zip(subjects, points, strict=True), start=1):
        card = None
        if several:
            note(f"{number} of {len(points)}: {', '.join(f'{name} {value}' for name, value in point.items())}")
            card = from_rank_0(finished_card(subject, names, images))
        cards.append(card or draw_and_compare(subject, evaluator, names, images))
    if rank.rank > 0:
        return
    if several:
        name = f"{'_'.join(several)}_{short_hash([subject.folder.name for subject in subjects])}"
        folder = args.out or first.folder.parent / name
        print(write_table(folder, points, cards))
        print(f"table and plot: {folder}", file=sys.stderr)
    else:
        print(table(cards[0]))
    for name, reason in cards[0].other.items():
        if isinstance(reason, str):
            print(f"{name}: {reason}")


def finished_card(subject: Subject, names: list[str], images: Mapping[str, ImageSet | None]) -> Card | None:
    """The card of the same settings that an earlier command wrote, if metrics, data and code are the same too."""
    try:
        card = read_card(subject.folder)
    except ConfigError:
        return None
    wanted = (names, images.get("train"), images.get("held_out"), git_commit())
    is_same = (card.metrics, card.reference, card.held_out, card.commit) == wanted
    return card if is_same and not subject.args.save_images else None


def draw_and_compare(
    subject: Subject, evaluator: Evaluator, names: list[str], images: Mapping[str, ImageSet | None]
) -> Card:
    """Evaluate one subject, and write its card, and the samples if they were asked for."""
    args, trained, rank = subject.args, subject.trained, subject.rank
    results, samples, started = [], [], time.perf_counter()
    for seed in subject.seeds:
        samples.append(evaluator.show(subject.pictures(seed, evaluator)).content)
        results.append(evaluator.compute())
    figures, other = card_figures(results, num_images=subject.num_images)
    is_run = args.images is None
    if is_run:
        assert trained is not None
        origin = origin_of_run(
            args.run,
            trained.config,
            trained.content,
            step=trained.step,
            images_seen=trained.images_seen,
            weights=trained.weights,
            model_parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
            model_evaluations=trained.sampler.evaluations_per_sample(),
        )
    else:
        origin = Origin(images=ImageSet(source="file", path=str(args.images), content=sha256_of(args.images)))
    card = Card(
        **vars(origin),
        **environment_of(rank.device),
        seeds=subject.seeds,
        num_samples=subject.num_images,
        class_balance=args.class_balance if trained is not None and is_run and not trained.takes_prompts else None,
        prompts=args.prompts or [],
        rounding=args.rounding if is_run else None,
        batch_size=args.batch_size if is_run else None,
        ranks=rank.world_size,
        metrics=names,
        epochs=args.epochs,
        reference=images.get("train"),
        reference_run=None if is_run or args.run is None else str(args.run),
        held_out=images.get("held_out"),
        extractors={name: sha256 for metric in evaluator.metrics for name, sha256 in metric.extractors.items()},
        inception_weights=None if args.inception_weights is None else str(args.inception_weights),
        figures=figures,
        samples=samples,
        other=other,
        seconds=round(time.perf_counter() - started, 1),
    )
    if rank.rank == 0:
        for seed, parts in subject.parts.items() if args.save_images else ():
            suffix = "" if len(subject.seeds) == 1 else f"_seed-{seed}"
            parts.write_npz(subject.folder / f"samples{suffix}.npz")
        write_card(subject.folder, card)
        for parts in subject.parts.values():
            parts.remove()
        print(f"card: {subject.folder / CARD_FILE}", file=sys.stderr)
    return card


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


def main() -> None:
    args, flags = parse(sys.argv[1:])
    if args.run is not None:
        check_address(args.run)

    import torch
    import torch.distributed as dist

    from torchditan.distributed.cpu_threads import configure_cpu
    from torchditan.distributed.process_group import Rank, check_devices, init_process_group

    configure_cpu()
    torch.set_float32_matmul_precision(args.float32_matmul_precision)
    rank = Rank.from_environment()
    check_devices(rank)
    if rank.world_size > 1:
        init_process_group(rank, timeout_seconds=TIMEOUT_S)
    try:
        evaluate(args, flags, rank)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except (MemoryError, RuntimeError, torch.OutOfMemoryError) as error:
        if not is_out_of_memory(error):
            raise
        right = "finished samples are kept; run the same command again, while drawing with a smaller --batch_size"
        raise OutOfMemory(f"out of memory at --batch_size = {args.batch_size}: {right}") from None
