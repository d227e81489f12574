# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Tracks of the speedrun, a folder with a track.toml each, and their entries, one TOML each (README.md has the rules).

Notable:
- a track is data: the options that all its entries share, those that an entry may set, and how a run is scored;
- an entry is a training configuration with a section [entry]. It starts from the settings of its `base`, an entry, or
  `config`, a file of train_configs/, and changes some, so a rung of the ladder is a few lines;
- an entry that sets an option of the track is refused before any work;
- code of an entry is one file next to its TOML. Its registry lines are added to torchditan/registry.py's tables in the
  processes of this entry only, and cannot replace existing ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchditan import registry
from torchditan.config.loader import as_flags, find_config, read_toml
from torchditan.config.schema import options, unknown_option
from torchditan.errors import ConfigError, did_you_mean, option_error

FOLDER = Path(__file__).resolve().parent
FIRST_TUNING_SEED = 100

_KEYS = {
    "title": str,
    "base": str,
    "config": str,
    "compare": list,
    "images": int,
    "ema_width": float,
    "rung": int,
    "code": str,
    "registry": dict,
}
"""Of [entry], with their types."""
_TABLES = ("OBJECTIVES", "BLOCKS", "OPTIMIZERS", "ARCHITECTURES")
"""Registries that an entry may extend: the model and its training, not the metric."""
_EXISTING = {table: frozenset(getattr(registry, table)) for table in _TABLES}


@dataclass(frozen=True)
class Track:
    """What the entries of one leaderboard share: `[track]` of its track.toml, and the options below it."""

    folder: Path
    title: str
    images: int
    """Most training images; repeated ones count each time."""
    seeds: list[int]
    """Of records."""
    free: list[str]
    """Sections and options that an entry may set."""
    fixed: list[str]
    """Options of these sections that it may not set."""
    needs: dict[str, str]
    """Modules that a score imports, with their extras."""
    evaluate: list[str]
    """Arguments of `torchditan evaluate`."""
    figures: dict[str, str]
    """Names in a result, and in the card of an evaluation."""
    model_evaluations: int
    """Most forward passes for one sample."""
    score: str
    """The figure that decides."""
    is_lower_better: bool
    columns: list[list[Any]]
    """Of the leaderboard: title, figure, factor, digits."""
    variables: dict[str, str]
    """Environment of the runs."""
    protocol: dict[str, Any]
    """Options of every training."""
    second: str | None = None
    """A figure that has to agree with a gain of the score, in the mean."""
    at_most: dict[str, float] = field(default_factory=dict)
    """Limits of the means of figures. A record above one is not valid."""
    reach: dict[str, float] = field(default_factory=dict)
    """Figures to reach. If given, checkpoints are evaluated in their order; `seconds` are those of the first one."""
    baseline: str = ""
    """The entry with which records are compared, unless they name another one, and whose step times count as 1."""
    rung_seeds: list[int] = field(default_factory=list)
    minutes: float | None = None
    """Most minutes of a training: `baseline` takes these, and another entry as much by the ratio of step times."""
    tolerance: float | None = None
    """Of a repetition on another machine, relative. None: half of the interval over the seeds of the entry."""
    needs_gpu: bool = False
    ideas: list[str] = field(default_factory=list)
    """Entries that nobody has tried, for the leaderboard."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def names(self) -> list[str]:
        """All entries, sorted."""
        return sorted(path.stem for path in (self.folder / "entries").glob("*.toml"))

    def is_free(self, option: str) -> bool:
        """Whether an entry may set an option."""
        is_named = option in self.free or option.split(".")[0] in self.free
        return is_named and option not in self.fixed and option not in self.protocol


def track_names(tracks: Path = FOLDER) -> list[str]:
    return sorted(path.parent.name for path in tracks.glob("*/track.toml"))


def load_track(name: str, tracks: Path = FOLDER) -> Track:
    """Read a track from its folder in `tracks`.

    Raises:
        ConfigError: it does not exist.
    """
    if name not in track_names(tracks):
        raise option_error("TRACK", name, f"must be one of {', '.join(track_names(tracks))}")
    values = read_toml(tracks / name / "track.toml")
    own = {key.removeprefix("track."): values.pop(key) for key in [*values] if key.startswith("track.")}
    return Track(folder=tracks / name, protocol=values, **own)


@dataclass(frozen=True)
class Entry:
    """A recipe for the speedrun, complete with what it inherits."""

    track: Track
    name: str
    title: str
    """The recipe in a few words; for a rung, the change."""
    images: int
    """Training images, a multiple of the batch size."""
    settings: dict[str, Any]
    """Options of `torchditan train` by name, without those of the track."""
    base: str | None = None
    """The entry from which it inherits, and with which a rung is compared."""
    compare: tuple[str, ...] = ()
    """The entries with which a record is compared."""
    rung: int | None = None
    """Position in the ladder; None for other entries."""
    ema_width: float | None = None
    """`ema.width` of the training, in place of its [ema]; None scores that EMA, or the weights without one."""
    code: Path | None = None
    registry: dict[str, dict[str, str]] = field(default_factory=dict)
    """Lines for tables of torchditan/registry.py: {"OBJECTIVES": {"mine": "my_file:MyObjective"}}."""

    @property
    def batch_size(self) -> int:
        return int(self.settings["training.global_batch_size"])

    @property
    def seeds(self) -> list[int]:
        return self.track.seeds if self.rung is None else self.track.rung_seeds

    @property
    def num_steps(self) -> int:
        return self.images // self.batch_size

    def flags(self, *, seed: int) -> list[str]:
        """Arguments of `torchditan train`, but where it writes."""
        settings = {**self.track.protocol, **self.settings}
        settings["training.steps"] = self.num_steps
        settings["training.seed"] = seed
        if self.ema_width is not None:
            settings = {option: value for option, value in settings.items() if not option.startswith("ema.")}
            settings["ema.width"] = self.ema_width
        return [*as_flags(settings)]

    def definition(self) -> dict[str, Any]:
        """All that determines the result but the seed, as JSON values."""
        return {
            "images": self.images,
            "ema_width": self.ema_width,
            "settings": dict(sorted(self.settings.items())),
            "code": None if self.code is None else self.code.read_text(encoding="utf-8"),
            "registry": self.registry,
            "protocol": dict(sorted(self.track.protocol.items())),
        }

    def digest(self) -> str:
        """Names a training. Entries that differ only in how they are sampled afterwards share it."""
        trained = split_sampling(self.settings)[0]
        return _hash(self.definition() | {"settings": trained})

    def recipe(self) -> str:
        """Names what a step does: entries that differ only in their images, sampling and average share it."""
        trained = split_sampling(self.settings)[0]
        return _hash(self.definition() | {"settings": trained, "ema_width": None, "images": None})


def split_sampling(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a training, and those of drawing samples from it."""
    sampling = {option: value for option, value in settings.items() if option.startswith("sampling.")}
    return {option: value for option, value in settings.items() if option not in sampling}, sampling


def _hash(definition: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:10]


def register(lines: dict[str, dict[str, str]], code: Path | None) -> None:
    """Add an entry's lines to the registries of this process, so that its options are known."""
    if code is not None:
        sys.path.insert(0, str(code.parent))
    for table, added in lines.items():
        getattr(registry, table).update(added)


def load(track: Track, name: str, changes: dict[str, Any] | None = None) -> Entry:
    """Read an entry and what it inherits.

    Args:
        name: of its file, with or without `.toml`.
        changes: settings to replace, for tuning.

    Raises:
        ConfigError: the file does not exist, or breaks a rule.
    """
    entry = _load(track, name.removesuffix(".toml"))
    entry = replace(entry, settings={**entry.settings, **(changes or {})})
    _check_options(entry)
    _check_numbers(entry)
    if entry.rung is not None:
        if not track.rung_seeds:
            raise ConfigError(f"{entry.name}.toml: the track {track.name} has no ladder; leave rung out")
        if entry.base is None:
            raise ConfigError(f"{entry.name}.toml: a rung needs the base that it is compared with")
        images = _load(track, entry.base).images
        if images != entry.images:
            right = f"must be {images}, as its base {entry.base} has: a rung changes one thing"
            raise option_error(f"{entry.name}.toml: images", entry.images, right)
    return entry


def _load(track: Track, name: str) -> Entry:
    folder = track.folder / "entries"
    path = folder / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(f"{name} is not an entry of the track {track.name}{did_you_mean(name, track.names())}")
    values = read_toml(path)
    own = {option.removeprefix("entry."): values.pop(option) for option in [*values] if option.startswith("entry.")}
    for key, value in own.items():
        if key not in _KEYS:
            raise ConfigError(f"{path.name}: {key} is not a key of [entry]; must be one of {', '.join(_KEYS)}")
        if not isinstance(value, (_KEYS[key], int) if _KEYS[key] is float else _KEYS[key]):
            raise option_error(f"{path.name}: {key}", value, f"must be of the type {_KEYS[key].__name__}")
    base, compared = own.get("base"), own.get("compare", [track.baseline])
    for key, other in [*[("base", base)] * ("base" in own), *(("compare", other) for other in own.get("compare", ()))]:
        if other not in ("", *track.names()) or other == name:
            raise option_error(f"{path.name}: {key}", other, "must be another entry of the track")
    most = track.images if track.minutes is None else 0  # a time allows no number of images for every recipe
    parent = Entry(track, "", "", most, {}) if base is None else _load(track, base)
    if "config" in own:
        recipe = read_toml(find_config(str(own["config"])))
        values = {option: value for option, value in recipe.items() if track.is_free(option)} | values
    code = parent.code
    if "code" in own:
        code = folder / str(own["code"])
        if not code.is_file():
            raise option_error(f"{path.name}: code", own["code"], "must be a file next to it")
    lines = own.get("registry", {})
    return Entry(
        track=track,
        name=name,
        title=str(own.get("title", name)),
        images=own.get("images", parent.images),
        settings={**parent.settings, **values},
        base=base,
        compare=tuple(other for other in compared if other not in ("", name)),
        rung=own.get("rung"),
        ema_width=own.get("ema_width", parent.ema_width) or None,
        code=code,
        registry={
            table: {**parent.registry.get(table, {}), **lines.get(table, {})} for table in {**parent.registry, **lines}
        },
    )


def _check_options(entry: Entry) -> None:
    where = f"{entry.name}.toml"
    for table, lines in entry.registry.items():
        if table not in _TABLES:
            right = f"must be one of {', '.join(_TABLES)}"
            raise ConfigError(f"{where}: [entry.registry.{table}] cannot be extended; {right}")
        taken = [name for name in lines if name in _EXISTING[table]]
        if taken:
            raise ConfigError(f"{where}: [entry.registry.{table}] {taken[0]} exists; use another name")
    for option in entry.settings:
        if option not in options():
            raise ConfigError(f"{where}: {unknown_option(option)}")
        if not entry.track.is_free(option):
            raise ConfigError(f"{where}: the track fixes {option}; remove it")


def _check_numbers(entry: Entry) -> None:
    where, most, budget = f"{entry.name}.toml", entry.track.model_evaluations, entry.track.images
    values = {**entry.track.protocol, **entry.settings}
    batch_size, num_steps = (values.get(name) for name in ("training.global_batch_size", "sampling.num_steps"))
    if not isinstance(batch_size, int) or batch_size < 1:
        raise option_error(f"{where}: training.global_batch_size", batch_size, "must be a positive integer")
    doubled = (values.get("sampling.sampler") == "heun", values.get("sampling.guidance_scale") != 1)
    evaluations = 2 ** sum(doubled)
    if not isinstance(num_steps, int) or not 0 < num_steps * evaluations <= most:
        right = f"must be at most {most // evaluations}: a sample has {most} evaluations; guidance and heun double them"
        raise option_error(f"{where}: sampling.num_steps", num_steps, right)
    if not isinstance(entry.images, int) or not 0 < entry.images <= budget or entry.images % batch_size:
        right = f"must be 1 to {budget}, and a multiple of training.global_batch_size = {batch_size}"
        raise option_error(f"{where}: images", entry.images, right)
