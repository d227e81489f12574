# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The card of an evaluation, `card.json`: what was evaluated, every setting that changes a figure, and the figures.

Notable:
- numbers have full precision here; card_tables.py rounds them for `card.md` and the terminal;
- a card is read strictly: a missing, unknown or mistyped entry is one line that names the file and the entry;
- importing this module needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchditan.config.errors import ConfigError
from torchditan.config.trajectory import VALUES_BEFORE
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import to_json

VERSION = 1
"""Of the format, stored as `card`. Entries that are added later need a default value."""
CARD_FILE = "card.json"
_SECTION = "sampling."
_SAMPLING_BEFORE = {key.removeprefix(_SECTION): VALUES_BEFORE[key] for key in VALUES_BEFORE if key.startswith(_SECTION)}
"""Options of `[sampling]` that older cards do not have, with the behavior before they existed."""


@dataclass(frozen=True)
class CardFigure:
    """One figure over all sampling seeds."""

    value: float | None
    """Mean over the sampling seeds; None if it is not finite."""
    low: float | None
    high: float | None
    """Ends of the interval; None without one."""
    interval: str | None
    """What the interval covers: "sampling only: 95%, 3 seeds"."""
    num_images: int
    """Generated images of each seed."""
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
class Origin:
    """What was evaluated: a checkpoint of a run, or a file of images. `card_origin.py` fills it in."""

    run: str | None = None
    """The run directory, as it was given. None for a file of images, as are all entries but `images`."""
    run_id: str | None = None
    """Identifies the run, also after its folder moved."""
    images: ImageSet | None = None
    """The file of images; None for a run."""
    step: int | None = None
    images_seen: int | None = None
    weights: Literal["ema", "raw"] | None = None
    ema_decay: float | None = None
    """None for raw weights, and for an average that was computed after training."""
    ema_width: float | None = None
    """Relative width of an average that was computed after training."""
    training_seed: int | None = None
    config_hash: str | None = None
    """SHA-256 of the canonical JSON of the stored configuration."""
    trajectory_hash: str | None = None
    """SHA-256 of the options that decide what a run learns, without its seed: equal for two seeds of one recipe."""
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
    autoencoder_path: str | None = None
    """`--autoencoder.path`, if it replaced the run's own."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The `[sampling]` options that change samples."""
    model_evaluations: int | None = None
    """Forward passes per sample; a guided step counts two."""


@dataclass(frozen=True, kw_only=True)
class Card(Origin):
    """One evaluation, with all that is needed to repeat it."""

    commit: str | None
    """Of the code that evaluates."""
    seeds: list[int]
    """Sampling seeds: consecutive."""
    num_samples: int
    """Of each seed."""
    class_balance: Literal["data", "balanced", "random"] | None
    """How the classes of samples were chosen; None for a file of images, as for rounding and batch_size."""
    rounding: Literal["nearest", "down"] | None
    batch_size: int | None
    """Samples drawn together, which changes their last bits."""
    ranks: int = 1
    """Processes that drew. They change no figure."""
    metrics: list[str]
    epochs: int = 20
    """Of metrics that train a model."""
    reference: ImageSet
    reference_run: str | None = None
    """For a file of images, the run whose real images it was compared with, as it was given; None without one."""
    held_out: ImageSet | None = None
    extractors: dict[str, str]
    """Name -> SHA-256 of the weights."""
    inception_weights: str | None = None
    """`--inception_weights`, if it was given."""
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
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """`--float32_matmul_precision`: of the products of the model that drew."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each part of the evaluation."""
    created: str
    """ISO 8601, UTC."""


def read_card(path: str | Path) -> Card:
    """The card in a file, or in the folder of an evaluation.

    Raises:
        ConfigError: the file does not exist, is not a card, is damaged, or has an unsupported version.
    """
    file = Path(path)
    if file.is_dir():
        if not (file / CARD_FILE).is_file():
            raise ConfigError(f"{file} has no {CARD_FILE}; must be a card of scripts/evaluate.py, or its folder")
        file = file / CARD_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; must be a {CARD_FILE} of scripts/evaluate.py") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{file} is not a card, or is damaged: {error}") from None
    if not isinstance(content, dict) or "card" not in content:
        raise ConfigError(f"{file} is not a card: it has no entry `card`; must be a {CARD_FILE} of scripts/evaluate.py")
    version = content.pop("card")
    if isinstance(content.get("sampling"), dict) and content["sampling"]:  # a file of images has none
        content["sampling"] = {**_SAMPLING_BEFORE, **content["sampling"]}
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(f"{file} is a card of version {json.dumps(version)}; this code reads version {VERSION}")
    try:
        card: Card = _decode(Card, content, "")
        _check(card)
    except _DamagedError as error:
        raise ConfigError(f"{file} is a damaged card: {' '.join(str(error).split())}") from None
    return card


def save_json(path: Path, card: Card) -> None:
    """Write card.json atomically, with all digits."""
    write_file(path, to_json({"card": VERSION, **dataclasses.asdict(card)}, indent=2) + b"\n")


class _DamagedError(ValueError):
    """An entry of a card that is not valid."""


def _check(card: Card) -> None:
    for text in (card.run or "", card.reference_run or "", *card.metrics):
        if text.startswith("-"):  # `arguments_of` passes it as a word
            raise _DamagedError(f"{text} is an option; must be a run or a metric")
    first = card.seeds[0] if card.seeds else 0
    if card.seeds != list(range(first, first + max(1, len(card.seeds)))):
        raise _DamagedError(f"seeds = {card.seeds}: must be consecutive integers")
    for name, figure in card.figures.items():
        if len(figure.per_seed) != len(card.seeds):
            raise _DamagedError(f"figures.{name}.per_seed has {len(figure.per_seed)} values of {len(card.seeds)} seeds")


def _decode(kind: Any, value: Any, name: str) -> Any:
    """A JSON value as the type of its entry: a dataclass, list, dict, Literal, optional or plain type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        (wanted,) = (arg for arg in inner if arg is not type(None))
        return None if value is None else _decode(wanted, value, name)
    if origin is Literal:
        if value not in inner:
            raise _mistyped(name, value, f"one of {', '.join(inner)}")
        return value
    if origin is list:
        items = _expect(list, value, name, "a list")
        return [_decode(inner[0], item, f"{name}[{number}]") for number, item in enumerate(items)]
    if origin is dict:
        entries = _expect(dict, value, name, "a table")
        return {key: _decode(inner[1], entry, f"{name}.{key}") for key, entry in entries.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_table(kind, _expect(dict, value, name, "a table"), name)
    if kind is float:
        return _decode_number(value, name)
    return _expect(kind, value, name, {int: "an integer", str: "text", bool: "true or false"}[kind])


def _decode_table(kind: Any, entries: dict[str, Any], name: str) -> Any:
    prefix = f"{name}." if name else ""
    hints = typing.get_type_hints(kind)
    without = (dataclasses.MISSING, dataclasses.MISSING)
    required = [part.name for part in dataclasses.fields(kind) if (part.default, part.default_factory) == without]
    if missing := [key for key in required if key not in entries]:
        raise _DamagedError(f"it has no {prefix}{missing[0]}")
    if unknown := [key for key in entries if key not in hints]:
        raise _DamagedError(f"{prefix}{unknown[0]} is not an entry of version {VERSION}")
    return kind(**{key: _decode(hints[key], value, f"{prefix}{key}") for key, value in entries.items()})


def _decode_number(value: Any, name: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):  # Python's parser reads NaN and 1e999
        raise _mistyped(name, value, "a finite number")
    return float(value)


def _expect(kind: type, value: Any, name: str, description: str) -> Any:
    if type(value) is not kind:  # isinstance would accept a bool as an int
        raise _mistyped(name, value, description)
    return value


def _mistyped(name: str, value: Any, description: str) -> _DamagedError:
    shown = json.dumps(value, ensure_ascii=False)
    return _DamagedError(f"{name} = {shown if len(shown) <= 60 else shown[:57] + '...'}: must be {description}")


def settings_of(card: Card) -> dict[str, Any]:
    """Every setting that can change a figure, by name: data, extractors and checkpoint first."""
    data = card.data or Data(name="", fingerprint=None)
    held_out = card.held_out or ImageSet(source="held_out")
    checkpoint = {
        "weights": card.weights,
        "step": card.step,
        "images_seen": card.images_seen,
        "ema_decay": card.ema_decay,
        "ema_width": card.ema_width,
        "run_id": card.run_id,
        "training_seed": card.training_seed,
        "trajectory_hash": card.trajectory_hash,
        "config_hash": card.config_hash,
        "training_commit": card.training_commit,
        "model": card.model,
        "model_parameters": card.model_parameters,
        "decoder": card.decoder,
    }
    return {
        "data.name": data.name or None,
        "data.fingerprint": data.fingerprint,
        "data.image_size": data.image_size,
        "data.num_classes": data.num_classes,
        "reference": card.reference.path or card.reference.source,
        "reference.content": card.reference.content,
        "reference.num_images": card.reference.num_images,
        "reference.is_decoded": card.reference.is_decoded,
        "held_out.content": held_out.content,
        "held_out.num_images": held_out.num_images,
        **{f"extractors.{name}": content for name, content in card.extractors.items()},
        **({"images.content": card.images.content} if card.images else checkpoint),
        **{f"sampling.{key}": value for key, value in card.sampling.items()},
        "model_evaluations": card.model_evaluations,
        "metrics": card.metrics,
        "seeds": card.seeds,
        "num_samples": card.num_samples,
        "class_balance": card.class_balance,
        "rounding": card.rounding,
        "batch_size": card.batch_size,
        "epochs": card.epochs,
        "precision": card.precision,
        "device": card.device_name or card.device,
        "commit": card.commit,
        **{f"versions.{name}": version for name, version in card.versions.items()},
    }


def arguments_of(card: Card) -> list[str]:
    """The arguments with which scripts/evaluate.py repeats a card, the run first."""
    precision = card.float32_matmul_precision
    given = {
        "step": card.step,
        "weights": card.weights,
        "images": card.images.path if card.images else None,
        "reference": card.reference.path,
        "inception_weights": card.inception_weights,
        "num_samples": card.num_samples if card.images is None else None,
        "seed": card.seeds[0],
        "seeds": len(card.seeds) if card.images is None else None,
        "batch_size": card.batch_size,
        "class_balance": card.class_balance,
        "rounding": card.rounding,
        "float32_matmul_precision": None if precision == "highest" else precision,
        "epochs": card.epochs,
        "autoencoder.path": card.autoencoder_path,
    }
    run = card.run if card.images is None else card.reference_run
    arguments = [] if run is None else [run]
    arguments += ["--metrics", *card.metrics]
    arguments += [f"--{name}={value}" for name, value in given.items() if value is not None]
    return arguments + [f"--sampling.{key}={_flag(value)}" for key, value in card.sampling.items()]


def _flag(value: Any) -> str:
    """A value as the configuration's flags write it."""
    if isinstance(value, list):
        return ",".join(map(_flag, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
