# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The card of an evaluation, `card.json`: what was evaluated, every setting that changes a figure, and the figures.

Notable:
- numbers have full precision here; card_tables.py rounds them for `card.md` and the terminal;
- a card is read strictly: a missing, unknown or mistyped entry is one line that names the file and the entry;
- importing this module needs no torch.
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

from torchditan.config.errors import ConfigError, is_finite_number
from torchditan.config.loader import from_dict
from torchditan.config.options import Config, Sampling, Training
from torchditan.config.trajectory import VALUES_BEFORE, trajectory
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import to_json

if TYPE_CHECKING:
    import torch

    from torchditan.evaluation.metric import Figure

VERSION = 1
"""Of the format, stored as `card`. Entries that are added later need a default value."""
CARD_FILE = "card.json"
OF_NO_RUN = "sha256-"
"""Start of the `run_id` of weights that belong to no run."""
_SECTION = "sampling."
_SAMPLING_BEFORE = {key.removeprefix(_SECTION): VALUES_BEFORE[key] for key in VALUES_BEFORE if key.startswith(_SECTION)}
"""Options of `[sampling]` that older cards do not have, with the behavior before they existed."""
_NOT_EVALUATED = (
    *("images_per_class", "max_classes", "prompts", "at_start"),  # of sample grids
    "use_ema",  # of grids during training; a card has `weights`
    "embedded_guidance",  # of published models, which torchditan evaluate refuses
)


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
class Origin:
    """What was evaluated: a checkpoint of a run, or a file of images. `origin_of_run` fills it in."""

    run: str | None = None
    """The run directory, as it was given. None for a file of images, as are all entries but `images`."""
    run_id: str | None = None
    """Identifies the run, also after its folder moved; for other weights `sha256-` and the start of their hash."""
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
    """How the classes of samples were chosen; None for prompts, and for a file of images as rounding and batch_size."""
    prompts: list[str] = field(default_factory=list)
    """`--prompts`, if they were given."""
    rounding: Literal["nearest", "down"] | None
    batch_size: int | None
    """Samples drawn together, which changes their last bits."""
    ranks: int = 1
    """Processes that drew. They change no figure."""
    metrics: list[str]
    epochs: int = 20
    """Of metrics that train a model."""
    reference: ImageSet | None
    """None for metrics of prompts, which compare with no images."""
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


# Files


def save_json(path: Path, card: Card) -> None:
    """Write card.json atomically, with all digits."""
    write_file(path, to_json({"card": VERSION, **dataclasses.asdict(card)}, indent=2) + b"\n")


def read_card(path: str | Path) -> Card:
    """The card in a file, or in the folder of an evaluation.

    Raises:
        ConfigError: the file does not exist, is not a card, is damaged, or has an unsupported version.
    """
    file = Path(path)
    right = f"must be a {CARD_FILE} of torchditan evaluate"
    if file.is_dir():
        file = file / CARD_FILE
        if not file.is_file():
            raise ConfigError(f"{path} has no {CARD_FILE}; {right}, or its folder")
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; {right}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{file} is not a card, or is damaged: {error}") from None
    if not isinstance(content, dict) or "card" not in content:
        raise ConfigError(f"{file} is not a card: it has no entry `card`; {right}")
    version = content.pop("card")
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(f"{file} is a card of version {json.dumps(version)}; this code reads version {VERSION}")
    if isinstance(content.get("sampling"), dict) and content["sampling"]:  # a file of images has none
        content["sampling"] = {**_SAMPLING_BEFORE, **content["sampling"]}
    try:
        card: Card = _decode(Card, content, "")
        _check(card)
    except _DamagedError as error:
        raise ConfigError(f"{file} is a damaged card: {' '.join(str(error).split())}") from None
    return card


class _DamagedError(ValueError):
    """An entry of a card that is not valid."""


def _check(card: Card) -> None:
    """What the types of the entries do not say."""
    for text in (card.run or "", card.reference_run or "", *card.metrics, *card.prompts):
        if text.startswith("-"):  # `arguments_of` passes it as a word
            raise _DamagedError(f"{text} is an option; must be a run, a metric or a prompt")
    first = card.seeds[0] if card.seeds else 0
    if card.seeds != list(range(first, first + max(1, len(card.seeds)))):
        raise _DamagedError(f"seeds = {card.seeds}: must be consecutive integers")
    for name, figure in card.figures.items():
        if len(figure.per_seed) != len(card.seeds):
            raise _DamagedError(f"figures.{name}.per_seed has {len(figure.per_seed)} values of {len(card.seeds)} seeds")


_NAMES = {int: "an integer", str: "text", bool: "true or false", float: "a finite number", list: "a list"}


def _decode(kind: Any, value: Any, name: str) -> Any:
    """A JSON value as the type of its entry: a dataclass, list, dict, Literal, optional or plain type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (value is None and types.NoneType in inner):
        return value
    if types.NoneType in inner:
        return _decode(inner[0], value, name)
    if origin is list and isinstance(value, list):
        return [_decode(inner[0], item, f"{name}[{number}]") for number, item in enumerate(value)]
    prefix = f"{name}." if name else ""
    if origin is dict and isinstance(value, dict):
        return {key: _decode(inner[1], entry, f"{prefix}{key}") for key, entry in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        for part in dataclasses.fields(kind):
            if part.default is part.default_factory is dataclasses.MISSING and part.name not in value:
                raise _DamagedError(f"it has no {prefix}{part.name}")
        if unknown := [key for key in value if key not in hints]:
            raise _DamagedError(f"{prefix}{unknown[0]} is not an entry of version {VERSION}")
        build: Any = kind
        return build(**{key: _decode(hints[key], entry, f"{prefix}{key}") for key, entry in value.items()})
    if kind is float and is_finite_number(value):
        return float(value)
    if value in inner if origin is Literal else type(value) is kind is not float:  # a bool is no integer here
        return value
    shown = json.dumps(value, ensure_ascii=False)
    right = f"one of {', '.join(inner)}" if origin is Literal else _NAMES.get(origin or kind, "a table")
    raise _DamagedError(f"{name} = {shown if len(shown) <= 60 else shown[:57] + '...'}: must be {right}")


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
    """Every setting that can change a figure, by name: data, extractors and checkpoint first."""
    data = card.data or Data(name="", fingerprint=None)
    held_out = card.held_out or ImageSet(source="held_out")
    reference = card.reference or ImageSet(source="train")
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
        "reference": None if card.reference is None else reference.path or reference.source,
        "reference.content": reference.content,
        "reference.num_images": reference.num_images,
        "reference.is_decoded": None if card.reference is None else reference.is_decoded,
        "held_out.content": held_out.content,
        "held_out.num_images": held_out.num_images,
        **{f"extractors.{name}": content for name, content in card.extractors.items()},
        **({"images.content": card.images.content} if card.images else checkpoint),
        **{f"sampling.{key}": value for key, value in card.sampling.items()},
        "model_evaluations": card.model_evaluations,
        "metrics": card.metrics,
        "prompts": card.prompts or None,
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
    """The arguments with which torchditan evaluate repeats a card, the run first."""
    precision = card.float32_matmul_precision
    given = {
        "step": card.step,
        "weights": card.weights,
        "images": card.images.path if card.images else None,
        "reference": card.reference.path if card.reference else None,
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
    arguments += ["--prompts", *card.prompts] if card.prompts else []
    arguments += [f"--{name}={value}" for name, value in given.items() if value is not None]
    return arguments + [f"--sampling.{key}={_flag(value)}" for key, value in card.sampling.items()]


def _flag(value: Any) -> str:
    """A value as the configuration's flags write it."""
    if isinstance(value, list):
        return ",".join(map(_flag, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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
    std = statistics.stdev(values)
    return Spread(statistics.fmean(values), std, t_quantile(len(values) - 1) * std / math.sqrt(len(values)))


def t_quantile(degrees: int) -> float:
    """97.5% quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


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
    from torchditan.evaluation.metric import Figure

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


def origin_of_run(
    run: Path,
    config: Config,
    content: Mapping[str, Any],
    *,
    step: int,
    images_seen: int,
    weights: Literal["ema", "raw"],
    model_parameters: int,
    model_evaluations: int,
) -> Origin:
    """The part of a card that describes a checkpoint of a run.

    Args:
        run: the run directory or another place of weights, as it was given.
        config: its options, with the `--sampling` and `--autoencoder` flags of this evaluation.
        content: what config.json of the run says, or the file about its weights (`TrainedModel.content`).
        model_evaluations: see `Sampler.evaluations_per_sample`.
    """
    stored = from_dict(content["config"])
    path = config.autoencoder.path
    imported = content.get("imported")
    if not isinstance(imported, dict):
        imported = {}
    is_foreign, ema_width = "format" in imported, imported.get("ema_width")
    return Origin(
        run=str(run),
        run_id=content.get("run_id"),
        step=step,
        images_seen=images_seen,
        weights=weights,
        ema_decay=config.ema.decay if weights == "ema" and not is_foreign and ema_width is None else None,
        ema_width=ema_width,
        training_seed=None if is_foreign else config.training.seed,
        config_hash=_hash(content["config"]),
        trajectory_hash=trajectory_hash(stored),
        training_precision=None if is_foreign else _precision_text(stored.training),
        training_commit=content.get("git_commit"),
        training_versions={} if is_foreign else content.get("versions") or {},
        training_hardware=_hardware_text(content.get("hardware")),
        imported=imported if is_foreign else None,
        data=Data(
            name=config.dataset.dataset_name,
            fingerprint=config.dataset.fingerprint,
            image_size=config.dataset.image_size,
            num_classes=config.dataset.num_classes,
        ),
        model=" ".join([config.model.name, config.model.flavor, *config.model.overrides]),
        model_parameters=model_parameters,
        decoder=config.autoencoder.fingerprint,
        autoencoder_path=path if path != stored.autoencoder.path else None,
        sampling=sampling_settings(config.sampling),
        model_evaluations=model_evaluations,
    )


def sampling_settings(sampling: Sampling) -> dict[str, Any]:
    """The `[sampling]` options that change the samples of an evaluation."""
    return {key: value for key, value in dataclasses.asdict(sampling).items() if key not in _NOT_EVALUATED}


def trajectory_hash(config: Config) -> str:
    """SHA-256 of the options that decide what a run learns, and of its steps, without the training seed.

    An option that was added later changes no hash of a run that behaves as runs did before.
    """
    options = {**trajectory(config), "training.steps": config.training.steps}
    absent = object()
    return _hash(
        {
            name: value
            for name, value in options.items()
            if name != "training.seed" and VALUES_BEFORE.get(name, absent) != value
        }
    )


def _hash(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _hardware_text(hardware: Any) -> str | None:
    if not isinstance(hardware, dict):
        return None  # an imported run does not have it
    return f"{hardware.get('device_count', 1)} x {hardware.get('device_name', hardware.get('device'))}"


def _precision_text(training: Training) -> str:
    products = training.float32_matmul_precision
    return training.mixed_precision_param + ("" if products == "highest" else f", products {products}")


def precision_of(device: torch.device) -> str:
    """Of the model that draws: "float32", where convolutions on a GPU may be in TF32, and products in less."""
    import torch

    is_tf32 = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    products = torch.get_float32_matmul_precision()
    text = "float32" if products == "highest" else f"float32, products {products}"
    return f"{text}, convolutions in TF32" if is_tf32 else text


def environment_of(device: torch.device) -> dict[str, Any]:
    """The entries of a `Card` about this code, process and machine: commit, versions, precision, device and time."""
    import torch

    return {
        "precision": precision_of(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "commit": provenance.git_commit(),
        "versions": provenance.versions("torchditan", "torch", "numpy"),
        "device": device.type,
        "device_name": provenance.device_name(str(device)),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
