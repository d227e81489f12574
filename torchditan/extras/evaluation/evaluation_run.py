# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What torchditan evaluate does with its arguments: choose metrics and samples, draw, compare, and write the cards.

`evaluate`, at the end, has the order. `args` are those of the command (commands/evaluate.py).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from torchditan.config.loader import override
from torchditan.config.optional_libraries import how_to_install
from torchditan.config.options import Config, cache_folder, dataset_channels
from torchditan.config.prompts import read_prompts
from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets import build_dataset
from torchditan.distributed.process_group import Rank, from_rank_0
from torchditan.errors import ConfigError, option_error
from torchditan.extras.evaluation import DEFAULT_METRICS, NUM_SAMPLES
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
from torchditan.extras.evaluation.efficientnet_lite import NUM_FEATURES, PACKAGE
from torchditan.extras.evaluation.evaluator import Evaluator, is_judged_by_prompts
from torchditan.extras.evaluation.metric import Pictures, Source
from torchditan.extras.evaluation.sample_batches import image_shape, read_images
from torchditan.extras.evaluation.sample_parts import SampleParts, draw_pictures
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.registry import FAMILIES, entry_name
from torchditan.run.atomic_files import sha256_of
from torchditan.run.progress import report_progress
from torchditan.run.provenance import git_commit
from torchditan.sampling.drawing import Drawing, SampleRows, sampling_settings
from torchditan.sampling.sampler import ToPixels

NUM_OF_PROMPTS = 400
"""Samples by default if prompts are judged, half of them of each kind."""
MAX_CLASSIFIER_VALUES = 1 << 30
"""Values of the training images with which the classifier is computed by default: 1 GiB of them."""


def note(text: str) -> None:
    """One line on stderr, of rank 0."""
    if Rank.from_environment().rank == 0:
        print(text, file=sys.stderr)


def open_run(args: argparse.Namespace, flags: Sequence[str], rank: Rank) -> TrainedModel:
    with report_progress(f"loading {args.run}"):
        given: dict[str, Any] = {"device": rank.device, "dtype": None, "flags": flags}
        trained = TrainedModel.open(args.run, step=args.step, weights=args.weights, **given)
    if args.prompts is not None:
        if not trained.takes_prompts:
            raise option_error("--prompts", args.prompts, "this run was not trained on captions; leave it out")
        args.prompts = read_prompts("--prompts", args.prompts)
    return trained


def build_evaluator(args: argparse.Namespace, trained: TrainedModel | None, decode: ToPixels, rank: Rank) -> Evaluator:
    """The evaluator of this command, with the real images of the run."""
    prompts_of = trained.config.dataset.dataset_name if trained is not None and trained.takes_prompts else None
    if prompts_of is not None and trained is not None and len(trained.sample_shape) > 3:
        raise ConfigError(f"{args.run} draws videos; metrics are of images")
    by_prompts = is_judged_by_prompts(args.metrics or [], prompts_of)
    if by_prompts and args.reference is not None:
        right = "has no effect on samples that are compared with their prompts; leave it out"
        raise option_error("--reference", str(args.reference), right)
    datasets = {} if trained is None or args.without_data or by_prompts else open_real_images(args, trained)
    num_training = len(datasets.get("train", ()))
    is_small = args.reference is None and 0 < num_training <= NUM_FEATURES  # too few for a distance over EfficientNet
    samples_name = "--num_samples"
    if args.images is not None:
        num_samples, *size = image_shape(args.images)
        samples_name = str(args.images)
    else:
        assert trained is not None
        size = [*trained.image_size]
        num_samples = args.num_samples or (NUM_OF_PROMPTS if by_prompts else num_training if is_small else NUM_SAMPLES)
    image_size = (size[0], size[1])
    class_names = trained.class_names if trained is not None and args.images is None else []
    names = args.metrics or (["prompts"] if by_prompts else [])
    if not names:
        given: dict[str, Any] = {"image_size": image_size, "num_training": num_training, "is_small": is_small}
        names = default_metrics(num_samples, has_classes=bool(class_names), **given)
    return Evaluator(
        None if trained is None else trained.config,
        names,
        datasets,
        class_names=class_names,
        prompts_of=prompts_of if args.images is None else None,
        captioned=open_captions(trained) if trained is not None and by_prompts and args.prompts is None else None,
        num_samples=num_samples,
        image_size=image_size,
        decode=decode,
        device=rank.device,
        seed=args.seed,
        epochs=args.epochs,
        inception_weights=args.inception_weights,
        reference=args.reference,
        samples_name=samples_name,
    )


def open_real_images(args: argparse.Namespace, trained: TrainedModel) -> dict[Source, ImageDataset]:
    """Training and held-out images of the run; none if they are not there, and a reference replaces them.

    Raises:
        ConfigError: they cannot be read, or a model of captions does not draw such pictures.
    """
    config = trained.config
    is_other = config.model.name in FAMILIES or trained.is_latent or config.dataset.aspect_buckets
    if trained.takes_prompts and is_other:
        right = "must be a run of model.name dit on pixels of one size; others are compared during training"
        raise ConfigError(f"{args.run} was trained on captions; {right} (docs/finetune.md, Validation)")
    try:
        datasets: dict[Source, ImageDataset] = {
            "train": trained.open_images("train"),
            "held_out": trained.open_images("validation"),
        }
        if config.dataset.fingerprint not in (None, datasets["train"].fingerprint):
            note(f"note: {config.dataset.root_dir} has other images than those of the training")
        return datasets
    except ConfigError as error:
        if args.reference is None:
            raise
        note(f"no copy check and no held-out figures: {error}")
        return {}


def open_captions(trained: TrainedModel) -> tuple[Source, Any]:
    """The images whose captions are prompts: the held-out ones, or those of training if none are held out.

    Raises:
        ConfigError: they cannot be read.
    """
    config = trained.config
    channels = 3 if trained.is_latent else dataset_channels(config)
    places: dict[str, Any] = {"input_channels": channels, "cache_folder": cache_folder(config)}
    try:
        return "held_out", build_dataset(config.dataset, split="validation", **places)
    except ConfigError:
        return "train", build_dataset(config.dataset, split="train", **places)


def default_metrics(
    num_samples: int, *, image_size: tuple[int, int], num_training: int, is_small: bool, has_classes: bool
) -> list[str]:
    """The default metrics that can be computed; one line names the others."""
    has_effnet = importlib.util.find_spec(PACKAGE) is not None
    if has_effnet and is_small:
        note(
            f"{num_samples:,} samples for copies, KID and precision. No Fréchet distance and no classifier: for "
            f"these, {num_training:,} training images are too few; they need more than {NUM_FEATURES:,}"
        )
        return ["effnet"]
    missing = {}
    if not has_classes or not num_training:
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
    flags: list[str]
    """Options of the run that were typed, but those of [sampling]."""
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
        how = [asdict(config.autoencoder), asdict(config.text_encoder), args.rounding, args.float32_matmul_precision]
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
        if trained.takes_prompts:
            rows = trained.encode_prompts(self.evaluator.prompts(args.prompts or []))
            order = rows.in_turn(self.evaluator.num_samples)
        else:
            rows = SampleRows.all_classes(trained.class_names)
            order = self.evaluator.classes(args.class_balance, seed=seed)
        return trained.drawing(rows, order, seed=seed)

    def parts(self, seed: int) -> SampleParts:
        """The finished samples of a seed."""
        made_by = short_hash([self.digests[seed], git_commit()])  # another version may draw other samples
        folder = self.folder / "parts" / f"seed-{seed}_{made_by}"
        return SampleParts(folder, len(self.drawings[seed]))

    def pictures(self, seed: int) -> Iterator[Pictures]:
        """This rank's part of the pictures."""
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
        start = 0
        for batch, images in enumerate(read_images(self.args.images, batch_size=self.args.batch_size)):
            if batch % self.rank.world_size == self.rank.rank:
                yield Pictures(images, None, torch.arange(start, start + len(images)), "generated")
            start += len(images)

    def finished_card(self, about: Mapping[str, Any]) -> Card | None:
        """The card of the same settings that an earlier command wrote, if metrics, data and code are the same too.
        Parts of the user's own may have changed."""
        sampler = [] if self.trained is None else [self.trained.config.sampling.sampler]
        if any(":" in entry_name(name) for name in (*(self.args.metrics or ()), *sampler)):
            return None
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
        rank = self.rank
        results, samples, started = [], [], time.perf_counter()
        for seed in self.seeds:
            samples.append(self.evaluator.show(self.pictures(seed)).content)
            results.append(self.evaluator.compute())
        figures, other = card_figures(results, num_images=self.evaluator.num_samples)
        environment = environment_of(rank.device)
        if self.trained is not None and self.trained.dtype != torch.float32:  # of a published model
            environment["precision"] = str(self.trained.dtype).removeprefix("torch.")
        card = Card(
            **self._origin(),
            **environment,
            **about,
            prompts=self.evaluator.prompts_from,
            seeds=self.seeds,
            num_samples=self.evaluator.num_samples,
            ranks=rank.world_size,
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
        args, trained = self.args, self.trained
        if args.images is not None:
            images = ImageSet(source="file", path=str(args.images), content=sha256_of(args.images))
            return {"images": images, "options": options_of(args)}
        assert trained is not None
        sampling = trained.config.sampling
        settings = sampling_settings(sampling)
        if trained.config.model.name in FAMILIES:
            settings["embedded_guidance"] = sampling.embedded_guidance
        about = about_run(args.run, trained.config, trained.content, weights=trained.weights)
        return {
            **about,
            "step": trained.step,
            "images_seen": trained.images_seen,
            "model_parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
            "sampling": settings,
            "model_evaluations": trained.sampler.evaluations_per_sample(sampling),
            "options": options_of(
                args,
                step=trained.step,
                weights=trained.weights,
                num_samples=self.evaluator.num_samples,
                class_balance=None if trained.takes_prompts else args.class_balance,
            ),
            "flags": self.flags,
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


def options_of(args: argparse.Namespace, **chosen: Any) -> dict[str, Any]:
    """The options that repeat a command, as JSON: those given, those with defaults, and those that it chose itself."""
    found = {}
    for name, value in {**vars(args), **chosen}.items():
        if value is not None and value is not False and name not in ("out", "save_images"):
            found[name] = str(value) if isinstance(value, Path) else value
    return found


def without_sampling(flags: Sequence[str]) -> list[str]:
    """Flags and their values, but those of [sampling]."""
    kept, is_kept = [], True
    for word in flags:
        is_kept = not word.startswith("--sampling.") if word.startswith("--") else is_kept
        kept += [word] if is_kept else []
    return kept


def short_hash(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:6]


def evaluate(
    args: argparse.Namespace, flags: Sequence[str], points: Sequence[Mapping[str, str]], rank: Rank
) -> list[tuple[Path, Card]]:
    """Evaluate at each point and write the cards. All ranks call it together.

    Args:
        flags: options of the run that all points share.
        points: values of [sampling] options by their names; one empty point if there are not several values.

    Returns:
        The folder and the card of each point.
    """
    given = [[f"--sampling.{name}={value}" for name, value in point.items()] for point in points]
    trained = open_run(args, [*flags, *given[0]], rank) if args.run is not None else None
    decode = trained.open_decoder() if trained is not None else lambda samples: samples  # before the slow work
    evaluator = build_evaluator(args, trained, decode, rank)
    evaluator.read_real_images()
    is_decoded = trained is not None and trained.is_latent and not trained.config.autoencoder.online
    images = {
        source: ImageSet(source=source, num_images=shown.num_images, content=shown.content, is_decoded=is_decoded)
        for source, shown in evaluator.shown.items()
        if source != "generated"
    }
    if args.reference is not None:
        images["train"] = ImageSet(source="file", path=str(args.reference), content=sha256_of(args.reference))

    args.metrics = evaluator.names
    about = {
        "metrics": evaluator.names,
        "reference": images.get("train"),
        "held_out": images.get("held_out"),
        "extractors": {name: sha256 for metric in evaluator.metrics for name, sha256 in metric.extractors.items()},
    }
    subjects = []
    for point, settings in zip(points, given, strict=True):
        one = trained
        if trained is not None and point:
            one = replace(trained, config=override(trained.config, settings, sections=("sampling",)))
        own: dict[str, Any] = {"flags": without_sampling(flags), "is_one_of_several": bool(point)}
        subjects.append(Subject(args, one, evaluator, decode=decode, rank=rank, **own))
    found = []
    for number, (subject, point) in enumerate(zip(subjects, points, strict=True), start=1):
        card = None
        if point:
            note(f"{number} of {len(points)}: {', '.join(f'{name} {value}' for name, value in point.items())}")
            card = from_rank_0(subject.finished_card(about))
        found.append((subject.folder, card or subject.run(about)))
    return found
