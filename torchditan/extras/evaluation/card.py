# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The card of an evaluation, `card.json`: what was evaluated, every setting that changes a figure, and the figures.

Numbers have full precision here; card_tables.py rounds them for `card.md` and the terminal. Importing this module needs
no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torchditan.config.loader import as_flags, from_dict
from torchditan.config.options import Config
from torchditan.errors import ConfigError, is_finite_number
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import OF_NO_RUN, to_json

if TYPE_CHECKING:
    import torch

    from torchditan.extras.evaluation.metric import Figure

VERSION = 1
"""Of the format, stored as `card`."""
CARD_FILE = "card.json"


@dataclass(frozen=True)
class CardFigure:
    """One figure over all sampling seeds."""

    value: float | None
    """Mean over the sampling seeds; None if it is not finite."""
    low: float | None
    high: float | None
    """Ends of the interval; None without one."""
    interval: str | None
    """What the interval covers: "sampling only: 95%, 3 seeds"; or why there is none."""
    num_images: int
    """Generated images of each seed; the smallest number, if the seeds differ."""
    extractor: str | None
    """Network whose features it compares."""
    per_seed: list[float | None]


@dataclass(frozen=True)
class ImageSet:
    """Images that an evaluation read: the reference, held-out images, or a file of samples."""

    source: Literal["train", "held_out", "file"]
    path: str | None = None
    """The file, if the images are not those of the run's dataset."""
    num_images: int | None = None
    """None where a file of statistics does not say."""
    content: str | None = None
    """SHA-256 of the images, or of the file."""
    is_decoded: bool = False
    """Whether these are decoded latents, which lack what the autoencoder loses."""


@dataclass(frozen=True)
class Data:
    """The dataset of the run."""

    name: str
    fingerprint: str | None
    """As the run stored it; None for datasets without one, such as digits."""
    image_size: list[int] | None = None
    num_classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Card:
    """One evaluation, with all that is needed to repeat it."""

    run: str | None = None
    """The run directory, as it was given. A file of images has none, nor the entries up to `options` but `images`."""
    run_id: str | None = None
    """Identifies the run, also after its folder moved; for other weights `sha256-` and the start of their hash."""
    images: ImageSet | None = None
    """The file of images; None for a run."""
    step: int | None = None
    images_seen: int | None = None
    weights: Literal["ema", "raw"] | None = None
    ema_decay: float | None = None
    """None for raw weights, and with `ema.width`."""
    ema_width: float | None = None
    """`ema.width`; None for raw weights."""
    training_seed: int | None = None
    config_hash: str | None = None
    """SHA-256 of the canonical JSON of the stored configuration."""
    training_precision: str | None = None
    """`mixed_precision_param`, and `float32_matmul_precision` if it is not highest: "float32, products high"."""
    training_commit: str | None = None
    training_versions: dict[str, str | None] = field(default_factory=dict)
    training_hardware: str | None = None
    imported: dict[str, Any] | None = None
    """Of weights of another project: file, format and conversions. How they were trained is unknown."""
    data: Data | None = None
    model: str | None = None
    """Architecture and flavor: "dit DiT-Ti"."""
    model_parameters: int | None = None
    decoder: str | None = None
    """Fingerprint of the autoencoder that decodes samples; None for a model of pixels."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The `[sampling]` options that change samples."""
    model_evaluations: int | None = None
    """Forward passes per sample; a guided step counts two."""
    prompts: str | None = None
    """Origin of the samples' prompts: "given", "the metric's", "held-out captions" or "training captions"."""

    options: dict[str, Any]
    """Those of torchditan evaluate by name, also where they were left out: `step`, `class_balance`, `rounding`, ..."""
    flags: list[str] = field(default_factory=list)
    """Options of the run that were typed, but those of [sampling]."""
    commit: str | None
    """Of the code that evaluates."""
    seeds: list[int]
    """Sampling seeds: consecutive."""
    num_samples: int
    """Of each seed."""
    ranks: int = 1
    """Processes that drew. They change no figure."""
    metrics: list[str]
    reference: ImageSet | None
    """None for metrics of prompts, which compare with no images."""
    held_out: ImageSet | None = None
    extractors: dict[str, str]
    """Name -> SHA-256 of the weights."""
    figures: dict[str, CardFigure]
    samples: list[str] = field(default_factory=list)
    """SHA-256 of the images of each seed."""
    other: dict[str, Any] = field(default_factory=dict)
    """Results that are not one number, such as `per_class`."""
    versions: dict[str, str | None]
    device: str
    device_name: str | None = None
    precision: str = "float32"
    """Of the model that drew, in words. Extractors always compute in float32."""
    seconds: float | None = None
    """Duration of drawing and comparing."""
    created: str
    """ISO 8601, UTC."""


# Files


def write_card(folder: Path, card: Card) -> None:
    """Write card.md and card.json to a folder, each atomically; card.json last, so it marks a finished evaluation."""
    from torchditan.extras.evaluation.card_tables import markdown

    write_file(folder / "card.md", markdown(card).encode())
    write_file(folder / CARD_FILE, to_json({"card": VERSION, **dataclasses.asdict(card)}, indent=2) + b"\n")


def read_card(path: str | Path) -> Card:
    """The card in a file, or in the folder of an evaluation.

    Raises:
        ConfigError: it cannot be read, or is no card of this version. The message names the file and the entry.
    """
    file = Path(path) / CARD_FILE if Path(path).is_dir() else Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.pop("card", None) != VERSION:
            raise ValueError(f"it has no entry card = {VERSION}")
        card: Card = _decode(Card, content, "card")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a card of torchditan evaluate: {' '.join(str(error).split())}") from None
    return card


def _decode(kind: Any, value: Any, name: str) -> Any:
    """A JSON value as the type of its entry: a dataclass, list, dict, Literal, optional or plain type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (value is None and types.NoneType in inner):
        return value
    if types.NoneType in inner:
        return _decode(inner[0], value, name)
    if origin is list and isinstance(value, list):
        return [_decode(inner[0], item, f"{name}[{number}]") for number, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _decode(inner[1], entry, f"{name}.{key}") for key, entry in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        build: Any = kind
        hints = typing.get_type_hints(kind)
        return build(**{key: _decode(hints.get(key), entry, f"{name}.{key}") for key, entry in value.items()})
    if kind is float and is_finite_number(value):
        return float(value)
    if value in inner if origin is Literal else type(value) is kind is not float:  # a bool is no integer here
        return value
    raise ValueError(f"{name} = {json.dumps(value):.60} is wrong")


def cards_of_run(run: Path) -> list[Card]:
    """The evaluations of a run's samples that can be read, the newest first."""
    cards = []
    for file in run.glob(f"evaluation/**/{CARD_FILE}"):
        try:
            card = read_card(file)
        except ConfigError:  # damaged, or of another version
            continue
        if card.images is None and not str(card.run_id).startswith(OF_NO_RUN):  # drawn before the run had this name
            cards.append(card)
    return sorted(cards, key=lambda card: (card.created, card.step or 0), reverse=True)


# Settings


def settings_of(card: Card) -> dict[str, Any]:
    """All entries but the figures and the samples, by name: `data.name`, `sampling.num_steps`."""
    entries = dataclasses.asdict(card)
    nested = {name: value for name, value in entries.items() if name not in ("figures", "samples", "other")}
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {name: value}
    return found


def arguments_of(card: Card) -> list[str]:
    """The arguments with which torchditan evaluate repeats a card, the run first."""
    given = dict(card.options)
    words = [str(given.pop("run"))] if "run" in given else []
    for name, value in given.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}" if value is True else f"--{name}={value}")
    return [*words, *card.flags, *as_flags({f"sampling.{name}": value for name, value in card.sampling.items()})]


# Figures and intervals


class Spread(NamedTuple):
    """Mean of several values, and how far they spread."""

    mean: float
    std: float
    """Of one value, divided by K - 1."""
    half_width: float
    """Half of the 95% interval of the mean: t(0.975, K - 1) std / sqrt(K)."""


def spread_of(values: Sequence[float]) -> Spread:
    """Mean, standard deviation and 95% interval of two or more independent values."""
    from scipy.special import stdtrit

    std, quantile = statistics.stdev(values), float(stdtrit(len(values) - 1, 0.975))
    return Spread(statistics.fmean(values), std, quantile * std / math.sqrt(len(values)))


def card_figure(figures: Sequence[Figure]) -> CardFigure:
    """One figure of all sampling seeds. Its interval covers the choice of noise and classes, and no retraining.

    A figure with `no_interval` gets none. Two or more seeds give the 95% interval of their mean. One seed gives the
    figure's own interval, or else half of the difference between the halves of its images. For halves a and b,
    |a - b| / 2 estimates the standard error of (a + b) / 2 with one degree of freedom: the interval covers the mean
    over many seeds with a probability of 50%, and can be narrow by chance. Fréchet distances of halves are higher than
    that of all images, but by the same amount, so it cancels.

    Args:
        figures: the same figure of each seed.
    """
    first = figures[0]
    values = [figure.value for figure in figures]
    value: float | None = None
    half_width: float | None = None
    ends: tuple[float, float] | None = None
    label = None
    if all(map(math.isfinite, values)):
        value = statistics.fmean(values) if len(set(values)) > 1 else values[0]
        if first.no_interval is not None:
            label = first.no_interval
        elif len(values) == 1 and first.interval is not None:
            ends = first.interval
            label = "sampling only: 95%, one seed"
        elif len(values) == 1 and first.halves is not None:
            half_width = abs(first.halves[0] - first.halves[1]) / 2
            label = "sampling only: two halves, about 50%"
        elif len(set(values)) > 1:
            half_width = spread_of(values).half_width
            label = f"sampling only: 95%, {len(values)} seeds"
        elif len(values) > 1:  # a figure of real images, or one at its bound: an interval of width 0 would mislead
            label = f"equal for all {len(values)} seeds"
    if half_width is not None and not math.isfinite(half_width):
        half_width = label = None
    if value is not None and half_width is not None:
        ends = (value - half_width, value + half_width)
    return CardFigure(
        value=value,
        low=None if ends is None else ends[0],
        high=None if ends is None else ends[1],
        interval=label,
        num_images=min(figure.num_images for figure in figures),
        extractor=first.extractor,
        per_seed=[value if math.isfinite(value) else None for value in values],
    )


def card_figures(
    results: Sequence[Mapping[str, Any]], *, num_images: int
) -> tuple[dict[str, CardFigure], dict[str, Any]]:
    """The figures of a card, and its other results: tables of numbers, averaged over the seeds, and texts.

    Args:
        results: what the metrics computed for each seed, by name (`Metric.compute`).
        num_images: generated images of each seed, for numbers that do not say.
    """
    from torchditan.extras.evaluation.metric import Figure

    figures: dict[str, CardFigure] = {}
    other: dict[str, Any] = {}
    for name, first in results[0].items():
        found = [result[name] for result in results]
        if isinstance(first, str):
            other[name] = first
        elif isinstance(first, Mapping):
            tables = {key: [table[key] for table in found if key in table] for key in first}
            other[name] = {key: statistics.fmean(values) for key, values in tables.items()}
        else:
            figures[name] = card_figure(
                [one if isinstance(one, Figure) else Figure(float(one), num_images) for one in found]
            )
    return figures, other


# What a run and this machine contribute


def about_run(
    run: Path, config: Config, content: Mapping[str, Any], *, weights: Literal["ema", "raw"]
) -> dict[str, Any]:
    """The entries of a `Card` about a checkpoint of a run.

    Args:
        run: the run directory or another place of weights, as it was given.
        config: its options, with the flags of this evaluation.
        content: what config.json of the run says, or the file about its weights (`TrainedModel.content`).
    """
    stored = from_dict(content["config"])
    imported = content.get("imported")
    is_foreign = isinstance(imported, dict) and "format" in imported
    found: dict[str, Any] = {
        "run": str(run),
        "run_id": content.get("run_id"),
        "weights": weights,
        "config_hash": _hash(content["config"]),
        "training_commit": content.get("git_commit"),
        "training_hardware": _hardware_text(content.get("hardware")),
        "data": Data(
            name=config.dataset.dataset_name,
            fingerprint=config.dataset.fingerprint,
            image_size=config.dataset.image_size,
            num_classes=config.dataset.num_classes,
        ),
        "model": " ".join([config.model.name, config.model.flavor, *config.model.overrides]),
        "decoder": config.autoencoder.fingerprint,
    }
    if is_foreign:
        return {**found, "imported": imported}
    if weights == "ema":
        found |= {"ema_decay": config.ema.decay if config.ema.width is None else None, "ema_width": config.ema.width}
    products = stored.training.float32_matmul_precision
    precision = stored.training.mixed_precision_param + ("" if products == "highest" else f", products {products}")
    return found | {
        "training_seed": config.training.seed,
        "training_precision": precision,
        "training_versions": content.get("versions") or {},
    }


def _hash(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _hardware_text(hardware: Any) -> str | None:
    if not isinstance(hardware, dict):
        return None  # an imported run does not have it
    return f"{hardware.get('device_count', 1)} x {hardware.get('device_name', hardware.get('device'))}"


def environment_of(device: torch.device) -> dict[str, Any]:
    """The entries of a `Card` about this code, process and machine: commit, versions, precision, device and time."""
    import torch

    products = torch.get_float32_matmul_precision()
    precision = "float32" if products == "highest" else f"float32, products {products}"
    is_tf32 = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return {
        "precision": f"{precision}, convolutions in TF32" if is_tf32 else precision,
        "commit": provenance.git_commit(),
        "versions": provenance.versions("torchditan", "torch", "numpy"),
        "device": device.type,
        "device_name": provenance.device_name(str(device)),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
