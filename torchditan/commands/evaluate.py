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
from dataclasses import asdict, dataclass, replace
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
from torchditan.config.loader import override
from torchditan.config.optional_libraries import how_to_install, import_optional
from torchditan.config.options import Config, Sampling, cache_folder, dataset_channels
from torchditan.config.prompts import read_prompts
from torchditan.errors import ConfigError, option_error
from torchditan.extras.evaluation.card import (
    CARD_FILE,
    Card,
    ImageSet,
    about_run,
    card_figures,
    environment_of,
    read_card,
    write_card,
)
from torchditan.extras.evaluation.card_tables import table
from torchditan.extras.weights.shared import check_address
from torchditan.registry import FAMILIES, METRICS
from torchditan.run.atomic_files import sha256_of
from torchditan.run.progress import report_progress
from torchditan.run.provenance import git_commit
from torchditan.supervision.exit_status import OutOfMemory, is_out_of_memory

if TYPE_CHECKING:
    from torchditan.data_stream.datasets import ImageDataset
    from torchditan.distributed.process_group import Rank
    from torchditan.extras.evaluation.evaluator import Evaluator
    from torchditan.extras.evaluation.metric import Pictures, Source
    from torchditan.extras.evaluation.quality import Quality
    from torchditan.extras.evaluation.sample_parts import SampleParts
    from torchditan.extras.weights.trained_model import TrainedModel
    from torchditan.sampling.drawing import Drawing
    from torchditan.sampling.sampler import ToPixels

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
    if args.run is None and args.images is None:
        raise ConfigError(f"the following arguments are required: run, {RUN_EXAMPLES}; it comes before the options")
    if args.images is not None and of_samples:
        raise ConfigError(f"{of_samples[0]} has no effect with --images; leave it out")
    if args.reference is None and args.without_data:
        raise option_error("--without_data", True, "needs a --reference to compare with")
    if args.reference is None and args.run is None:
        raise option_error("--reference", None, "must be given with --images, or give the run whose data is compared")
    if args.samples_per_class is not None and args.class_balance not in (None, "balanced"):
        raise option_error("--class_balance", args.class_balance, "--samples_per_class needs balanced")
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
    from torchditan.sampling.drawing import sampling_settings

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
    from torchditan.extras.weights.trained_model import TrainedModel

    with report_progress(f"loading {args.run}"):
        trained = TrainedModel.open(args.run, step=args.step, weights=args.weights, device=rank.device, flags=flags)
    if args.prompts is not None:
        if not trained.takes_prompts:
            raise option_error("--prompts", args.prompts, "this run was not trained on captions; leave it out")
        args.prompts = read_prompts("--prompts", args.prompts)
    if args.samples_per_class is not None and trained.takes_prompts:
        right = "has no effect on samples of captions; leave it out, or give --num_samples"
        raise option_error("--samples_per_class", args.samples_per_class, right)
    if args.reference is not None and is_judged_by_prompts(args, trained):
        right = "has no effect on samples that are compared with their prompts; leave it out"
        raise option_error("--reference", str(args.reference), right)
    return trained


def is_judged_by_prompts(args: argparse.Namespace, trained: TrainedModel | None) -> bool:
    """Whether no real images are needed."""
    from torchditan.extras.evaluation import evaluator

    if trained is None or not trained.takes_prompts:
        return False
    return evaluator.is_judged_by_prompts(args.metrics or [], trained.config.dataset.dataset_name)


def open_real_images(args: argparse.Namespace, trained: TrainedModel | None) -> dict[Source, ImageDataset]:
    """Training and held-out images of the run; none for metrics of prompts, or if they are not needed and not there.

    Raises:
        ConfigError: they cannot be read, or a model of captions does not draw such pictures.
    """
    from torchditan.datasets import build_dataset

    if trained is None or args.without_data or is_judged_by_prompts(args, trained):
        return {}
    config = trained.config
    is_other = config.model.name in FAMILIES or trained.is_latent or config.dataset.aspect_buckets
    if trained.takes_prompts and is_other:
        right = "must be a run of model.name dit on pixels of one size; others are compared during training"
        raise ConfigError(f"{args.run} was trained on captions; {right} (docs/finetune.md, Validation)")
    places: dict[str, Any] = {"input_channels": dataset_channels(config), "cache_folder": cache_folder(config)}
    try:
        return {
            "train": build_dataset(config.dataset, split="train", **places),
            "held_out": build_dataset(config.dataset, split="validation", **places),
        }
    except ConfigError as error:
        if args.reference is None:
            raise
        note(f"no copy check and no held-out figures: {error}")
        return {}


def number_and_size(
    args: argparse.Namespace, trained: TrainedModel | None, *, num_training: int
) -> tuple[int, tuple[int, int]]:
    """The number of generated images of each seed, and their height and width."""
    from torchditan.extras.evaluation.sample_batches import image_shape

    if args.images is not None:
        number, *size = image_shape(args.images)
        return number, (size[0], size[1])
    assert trained is not None
    number = num_training if is_small(args, num_training) else NUM_SAMPLES
    if is_judged_by_prompts(args, trained):
        number = NUM_OF_PROMPTS
    if args.samples_per_class is not None:
        number = args.samples_per_class * max(1, trained.num_classes)
    return args.num_samples or number, trained.image_size


def is_small(args: argparse.Namespace, num_training: int) -> bool:
    """Whether the training images are too few for a Fréchet distance over EfficientNet-Lite0."""
    from torchditan.extras.evaluation.efficientnet_lite import NUM_FEATURES

    return args.reference is None and 0 < num_training <= NUM_FEATURES


def choose_metrics(
    args: argparse.Namespace,
    trained: TrainedModel | None,
    *,
    num_samples: int,
    image_size: tuple[int, int],
    num_training: int,
) -> list[str]:
    """`--metrics`, or the default ones that can be computed; one line names the others."""
    from torchditan.extras.evaluation.efficientnet_lite import NUM_FEATURES, PACKAGE

    if args.metrics is not None:
        return args.metrics
    if is_judged_by_prompts(args, trained):
        return ["prompts"]
    has_effnet = importlib.util.find_spec(PACKAGE) is not None
    if has_effnet and is_small(args, num_training):
        note(
            f"{num_samples:,} samples for copies, KID and precision. No Fréchet distance and no classifier: for "
            f"these, {num_training:,} training images are too few; they need more than {NUM_FEATURES:,}"
        )
        return ["effnet"]
    missing = {}
    if args.images is not None or trained is None or not trained.num_classes or not num_training:
        missing["classifier"] = "needs a model of classes and its training images"
    elif num_training * 3 * image_size[0] * image_size[1] > MAX_CLASSIFIER_VALUES:
        missing["classifier"] = "would keep all training images in memory; ask for it with --metrics"
    if not has_effnet:
        missing["effnet"] = f"needs {how_to_install('evaluation')}"
    elif num_samples <= NUM_FEATURES:
        missing["effnet"] = f"needs more than {NUM_FEATURES} samples, not {num_samples}"
    for name, why in missing.items():
        note(f"without {name}, which {why}")
    chosen = [name for name in DEFAULT_METRICS if name not in missing]
    if not chosen:
        raise ConfigError("--metrics: nothing can be computed by default; see the lines above")
    return chosen


def build_evaluator(args: argparse.Namespace, trained: TrainedModel | None, decode: ToPixels, rank: Rank) -> Evaluator:
    """The evaluator of this command, with the real images of the run."""
    from torchditan.extras.evaluation.evaluator import Evaluator

    datasets = open_real_images(args, trained)
    num_training = len(datasets.get("train", ()))
    num_samples, size = number_and_size(args, trained, num_training=num_training)
    names = choose_metrics(args, trained, num_samples=num_samples, image_size=size, num_training=num_training)
    samples_name = "--num_samples" if args.images is None else str(args.images)
    if args.samples_per_class is not None:
        samples_name = f"--samples_per_class {args.samples_per_class}"
    return Evaluator(
        None if trained is None else trained.config,
        names,
        datasets,
        class_names=trained.class_names if trained is not None and args.images is None else [],
        prompts_of=trained.config.dataset.dataset_name if trained is not None and trained.takes_prompts else None,
        num_samples=num_samples,
        image_size=size,
        decode=decode,
        device=rank.device,
        seed=args.seed,
        epochs=args.epochs,
        inception_weights=args.inception_weights,
        reference=args.reference,
        samples_name=samples_name,
    )


@dataclass
class Subject:
    """What is evaluated, with all its seeds: the images of a file, or samples of a run at one set of options."""

    args: argparse.Namespace
    trained: TrainedModel | None
    """The run, with the [sampling] options of this evaluation; None without one."""
    evaluator: Evaluator
    """With the metrics, after it read the real images."""
    decode: ToPixels
    rank: Rank
    is_one_of_several: bool
    """Of several values in one command."""

    @property
    def seeds(self) -> list[int]:
        return [self.args.seed + number for number in range(self.args.seeds)]

    @cached_property
    def drawings(self) -> dict[int, Drawing]:
        """The samples of each seed; empty for a file."""
        return {} if self.args.images is not None else {seed: self._drawing(seed) for seed in self.seeds}

    @cached_property
    def digests(self) -> dict[int, str]:
        """Of the pictures of each seed."""
        args, config = self.args, self.trained.config if self.trained is not None else Config()
        how = [asdict(config.autoencoder), args.rounding, args.float32_matmul_precision]
        return {seed: drawing.digest(how) for seed, drawing in self.drawings.items()}

    @cached_property
    def folder(self) -> Path:
        """Of the card. By default it says what is evaluated, and ends in a hash of all settings."""
        args, trained = self.args, self.trained
        if args.out is not None and not self.is_one_of_several:
            return args.out
        reference = None if args.reference is None else str(args.reference.resolve())
        settings = [args.metrics, reference, args.epochs, args.prompts, *self.digests.values()]
        if args.images is not None:
            run = None if args.run is None else str(args.run.resolve())
            return args.images.with_name(f"{args.images.stem}_evaluation_{short_hash([*settings, run])}")
        assert trained is not None
        sampling = trained.config.sampling
        words = [f"step-{trained.step}", trained.weights, f"{sampling.sampler}-{sampling.num_steps}"]
        words += [f"guidance-{sampling.guidance_scale:g}", f"seed-{args.seed}"]
        words += [f"{args.seeds}-seeds"] if args.seeds > 1 else []
        words += [f"{self.evaluator.num_samples}-samples", short_hash(settings)]
        return (args.out or trained.folder / "evaluation") / "_".join(words)

    def _drawing(self, seed: int) -> Drawing:
        args, trained = self.args, self.trained
        assert trained is not None
        rows, order = self.evaluator.choose_samples(
            seed=seed, class_balance=args.class_balance, encode=trained.encode_prompts, prompts=args.prompts or []
        )
        return trained.drawing(rows, order, seed=seed)

    def parts(self, seed: int) -> SampleParts:
        """The finished samples of a seed."""
        from torchditan.extras.evaluation.sample_parts import SampleParts

        folder = self.folder / "parts" / f"seed-{seed}_{self.digests[seed][:12]}"
        return SampleParts(folder, len(self.drawings[seed]))

    def pictures(self, seed: int) -> Iterator[Pictures]:
        """This rank's part of the pictures."""
        from torchditan.extras.evaluation.sample_parts import draw_pictures

        args, trained = self.args, self.trained
        if args.images is not None:
            return self._pictures_of_file()
        assert trained is not None
        return draw_pictures(
            trained.sampler,
            trained.model,
            self.drawings[seed],
            batch_size=args.batch_size,
            to_pixels=self.decode,
            rounding=args.rounding,
            parts=self.parts(seed),
        )

    def _pictures_of_file(self) -> Iterator[Pictures]:
        import torch

        from torchditan.extras.evaluation.metric import Pictures
        from torchditan.extras.evaluation.sample_batches import read_images

        start = 0
        for batch, images in enumerate(read_images(self.args.images, batch_size=self.args.batch_size)):
            if batch % self.rank.world_size == self.rank.rank:
                yield Pictures(images, None, torch.arange(start, start + len(images)), "generated")
            start += len(images)

    def finished_card(self, about: Mapping[str, Any]) -> Card | None:
        """The card of the same settings that an earlier command wrote, if metrics, data and code are the same too."""
        try:
            card = read_card(self.folder)
        except ConfigError:
            return None
        is_same = all(getattr(card, name) == value for name, value in {**about, "commit": git_commit()}.items())
        return card if is_same and not self.args.save_images else None

    def run(self, about: Mapping[str, Any]) -> Card:
        """Draw and compare, and write the card, and the samples if they were asked for.

        Args:
            about: the entries of the card that all evaluations of the command share.
        """
        args, rank = self.args, self.rank
        results, samples, started = [], [], time.perf_counter()
        for seed in self.seeds:
            samples.append(self.evaluator.show(self.pictures(seed)).content)
            results.append(self.evaluator.compute())
        figures, other = card_figures(results, num_images=self.evaluator.num_samples)
        extractors = {name: sha256 for metric in self.evaluator.metrics for name, sha256 in metric.extractors.items()}
        card = Card(
            **self._origin(),
            **environment_of(rank.device),
            **about,
            seeds=self.seeds,
            num_samples=self.evaluator.num_samples,
            prompts=args.prompts or [],
            ranks=rank.world_size,
            epochs=args.epochs,
            extractors=extractors,
            inception_weights=None if args.inception_weights is None else str(args.inception_weights),
            figures=figures,
            samples=samples,
            other=other,
            seconds=round(time.perf_counter() - started, 1),
        )
        if rank.rank == 0:
            self._write(card)
        return card

    def _origin(self) -> dict[str, Any]:
        """The entries of the card about the run and how it was sampled, or about the file."""
        from torchditan.sampling.drawing import sampling_settings

        args, trained = self.args, self.trained
        if args.images is not None:
            images = ImageSet(source="file", path=str(args.images), content=sha256_of(args.images))
            return {"images": images, "reference_run": None if args.run is None else str(args.run)}
        assert trained is not None
        sampling = trained.config.sampling
        about = about_run(args.run, trained.config, trained.content, weights=trained.weights)
        return {
            **about,
            "step": trained.step,
            "images_seen": trained.images_seen,
            "model_parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
            "sampling": sampling_settings(sampling),
            "model_evaluations": trained.sampler.evaluations_per_sample(sampling),
            "class_balance": None if trained.takes_prompts else args.class_balance,
            "rounding": args.rounding,
            "batch_size": args.batch_size,
        }

    def _write(self, card: Card) -> None:
        all_parts = {seed: self.parts(seed) for seed in self.drawings}
        for seed, parts in all_parts.items() if self.args.save_images else ():
            suffix = "" if len(self.seeds) == 1 else f"_seed-{seed}"
            parts.write_npz(self.folder / f"samples{suffix}.npz")
        write_card(self.folder, card)
        for parts in all_parts.values():
            parts.remove()
        note(f"card: {self.folder / CARD_FILE}")


def save_reference(path: Path, evaluator: Evaluator, quality: Quality) -> None:
    """Write the training images, and statistics of the extractor's features. Only rank 0 has them all."""
    from torchditan.extras.evaluation.sample_batches import write_reference

    pool, spatial = quality.reference_statistics()
    pictures = evaluator.real_pictures("train", rank=0, world_size=1)
    images = (batch.images.expand(-1, 3, -1, -1) for batch in pictures)
    shape = (evaluator.shown["train"].num_images, *evaluator.image_size)
    write_reference(path, images, shape=shape, pool=pool, spatial=spatial, extractor=quality.extractor.name)
    note(f"reference: {path}")


def short_hash(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:6]


def evaluate(args: argparse.Namespace, flags: list[str], rank: Rank) -> None:
    """Evaluate each combination of the values, write the cards, and print the figures."""
    from torchditan.distributed.process_group import from_rank_0
    from torchditan.extras.evaluation.quality import Quality
    from torchditan.extras.report.sampling_table import write_table

    fixed, several = split_flags(flags)
    points = [dict(zip(several, values, strict=True)) for values in itertools.product(*several.values())]
    given = [[f"--sampling.{name}={value}" for name, value in point.items()] for point in points]
    if several:
        import_optional("matplotlib", extra="evaluation")
    trained = open_run(args, [*fixed, *given[0]], rank) if args.run is not None else None
    decode = trained.open_decoder() if trained is not None else lambda samples: samples  # before the slow work
    evaluator = build_evaluator(args, trained, decode, rank)
    quality: Any = next((metric for metric in evaluator.metrics if isinstance(metric, Quality)), None)
    if args.save_reference is not None and quality is None:
        raise option_error("--save_reference", str(args.save_reference), "needs --metrics effnet or inception")
    evaluator.read_real_images()
    is_decoded = trained is not None and trained.is_latent and not trained.config.autoencoder.online
    images = {
        source: ImageSet(source=source, num_images=shown.num_images, content=shown.content, is_decoded=is_decoded)
        for source, shown in evaluator.shown.items()
        if source != "generated"
    }
    if args.reference is not None:
        images["train"] = ImageSet(source="file", path=str(args.reference), content=sha256_of(args.reference))
    if args.save_reference is not None and rank.rank == 0:
        save_reference(args.save_reference, evaluator, quality)

    about = {"metrics": evaluator.names, "reference": images.get("train"), "held_out": images.get("held_out")}
    subjects = []
    for settings in given:
        one = trained
        if trained is not None and several:
            one = replace(trained, config=override(trained.config, settings, sections=("sampling",)))
        subjects.append(Subject(args, one, evaluator, decode=decode, rank=rank, is_one_of_several=bool(several)))
    cards = []
    for number, (subject, point) in enumerate(zip(subjects, points, strict=True), start=1):
        card = None
        if several:
            note(f"{number} of {len(points)}: {', '.join(f'{name} {value}' for name, value in point.items())}")
            card = from_rank_0(subject.finished_card(about))
        cards.append(card or subject.run(about))
    if rank.rank > 0:
        return
    if several:
        name = f"{'_'.join(several)}_{short_hash([subject.folder.name for subject in subjects])}"
        folder = args.out or subjects[0].folder.parent / name
        print(write_table(folder, points, cards))
        note(f"table and plot: {folder}")
    else:
        print(table(cards[0]))
    for name, reason in cards[0].other.items():
        if isinstance(reason, str):
            print(f"{name}: {reason}")


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
