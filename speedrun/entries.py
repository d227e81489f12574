# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Entries of the speedrun: one TOML each, `entries/NAME.toml` (README.md has the rules).

Notable:
- an entry is a training configuration with a section [entry]. It starts from the settings of its `base` and changes
  some, so a rung of the ladder is a few lines;
- what all entries share is in protocol.toml; an entry that sets one of these options is refused before any work;
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan import registry
from torchditan.config.loader import as_flags, read_toml
from torchditan.config.schema import options
from torchditan.errors import ConfigError, did_you_mean, option_error

FOLDER = Path(__file__).resolve().parent
ENTRIES = FOLDER / "entries"
PROTOCOL = FOLDER / "protocol.toml"

BUDGET = 96_000
"""Training images of the longest entries."""
MODEL_EVALUATIONS = 32
"""Most forward passes for one sample."""
NUM_SAMPLES = 2048
SAMPLING_SEED = 0
NUM_THREADS = 1
"""Per run. One run per core keeps all cores busy, and the numbers do not depend on the number of cores."""
FIRST_TUNING_SEED = 100
LADDER_SEEDS = (0, 1, 2)
CONFIRMATION_SEEDS = (10, 11, 12, 13, 14)
BASELINE = "official_dit"
"""The entry with which records are compared, unless they name another one."""
METRIC = "FD-EffNetLite0"

_UNIFORM_WIDTH = 0.2887
_SECTIONS = ("model", "diffusion", "optimizer", "lr_scheduler", "ema", "sampling")
_TRAINING = ("global_batch_size", "max_norm")
_FORBIDDEN = ("model.path", "ema.width")
_KEYS = ("title", "base", "compare", "images", "ema_width", "rung", "code", "registry")
_TABLES = ("OBJECTIVES", "BLOCKS", "OPTIMIZERS", "ARCHITECTURES")
"""Registries that an entry may extend: the model and its training, not the metric."""
_EXISTING = {table: frozenset(getattr(registry, table)) for table in _TABLES}


@dataclass(frozen=True)
class Entry:
    """A recipe for the speedrun, complete with what it inherits."""

    name: str
    title: str
    """The recipe in a few words; for a rung, the change."""
    images: int
    """Training images, a multiple of the batch size and at most `BUDGET`."""
    settings: dict[str, Any]
    """Options of train.py by name, without those of protocol.toml."""
    base: str | None = None
    """The entry from which it inherits, and with which a rung is compared."""
    compare: tuple[str, ...] = (BASELINE,)
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
    def num_steps(self) -> int:
        return self.images // self.batch_size

    def flags(self, *, seed: int) -> list[str]:
        """Arguments of train.py, but where it writes."""
        settings = dict(self.settings)
        settings["training.steps"] = self.num_steps
        settings["training.seed"] = seed
        if self.ema_width is not None:
            settings = {option: value for option, value in settings.items() if not option.startswith("ema.")}
            settings["ema.width"] = self.ema_width
        return [f"--job.config_file={PROTOCOL}", *as_flags(settings)]

    def definition(self) -> dict[str, Any]:
        """All that determines the result but the seed, as JSON values."""
        return {
            "images": self.images,
            "ema_width": self.ema_width,
            "settings": dict(sorted(self.settings.items())),
            "code": None if self.code is None else self.code.read_text(encoding="utf-8"),
            "registry": self.registry,
            "protocol": dict(sorted(read_toml(PROTOCOL).items())),
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


def names(folder: Path = ENTRIES) -> list[str]:
    """All entries, sorted."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def load(name: str, changes: dict[str, Any] | None = None, *, folder: Path = ENTRIES) -> Entry:
    """Read an entry and what it inherits.

    Args:
        name: of its file, with or without `.toml`.
        changes: settings to replace, for tuning.
        folder: where entries are.

    Raises:
        ConfigError: the file does not exist, or breaks a rule.
    """
    entry = _load(name.removesuffix(".toml"), folder, heirs=())
    entry = replace(entry, settings={**entry.settings, **(changes or {})})
    _check_options(entry)
    _check_numbers(entry)
    if entry.rung is not None:
        if entry.base is None:
            raise ConfigError(f"{entry.name}.toml: a rung needs the base that it is compared with")
        images = _load(entry.base, folder, heirs=()).images
        if images != entry.images:
            right = f"must be {images}, as its base {entry.base} has: a rung changes one thing"
            raise option_error(f"{entry.name}.toml: images", entry.images, right)
    return entry


def _load(name: str, folder: Path, *, heirs: tuple[str, ...]) -> Entry:
    path = folder / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(f"{name} is not an entry in {folder.name}/{did_you_mean(name, names(folder))}")
    if name in heirs:
        raise ConfigError(f"{path.name}: its bases form a cycle, {' -> '.join([*heirs[heirs.index(name) :], name])}")
    values = read_toml(path)
    own = {option.removeprefix("entry."): values.pop(option) for option in [*values] if option.startswith("entry.")}
    for key in own:
        if key not in _KEYS:
            raise ConfigError(f"{path.name}: {key} is not a key of [entry]; must be one of {', '.join(_KEYS)}")
    base = own.get("base")
    parent = Entry("", "", BUDGET, {}) if base is None else _load(str(base), folder, heirs=(*heirs, name))
    code = parent.code
    if "code" in own:
        code = folder / str(own["code"])
        if not code.is_file():
            raise option_error(f"{path.name}: code", own["code"], f"must be a file in {folder.name}/")
        if parent.code is not None:
            right = f"its base has {parent.code.name}; an entry has one file of code"
            raise option_error(f"{path.name}: code", own["code"], right)
    tables = {**parent.registry, **own.get("registry", {})}
    compared = own.get("compare", [])
    if not isinstance(compared, list) or not set(map(str, compared)) <= {*names(folder)}:
        raise option_error(f"{path.name}: compare", compared, f"must be a list of entries in {folder.name}/")
    return Entry(
        name=name,
        title=str(own.get("title", name)),
        images=own.get("images", parent.images),
        settings={**parent.settings, **values},
        base=base,
        compare=tuple(compared) if "compare" in own else (BASELINE,),
        rung=own.get("rung"),
        ema_width=own.get("ema_width", parent.ema_width) or None,
        code=code,
        registry={
            table: {**parent.registry.get(table, {}), **own.get("registry", {}).get(table, {})} for table in tables
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
    shared, known = read_toml(PROTOCOL), options()
    for option in entry.settings:
        if option not in known:
            raise ConfigError(f"{where}: {option} is not an option{did_you_mean(option, list(known))}")
        section, key = option.split(".")
        is_free = section in _SECTIONS or (section == "training" and key in _TRAINING)
        if option in shared or option in _FORBIDDEN or not is_free:
            raise ConfigError(f"{where}: the protocol fixes {option}; remove it")


def _check_numbers(entry: Entry) -> None:
    where = f"{entry.name}.toml"
    batch_size, num_steps = (entry.settings.get(name) for name in ("training.global_batch_size", "sampling.num_steps"))
    if not isinstance(batch_size, int) or batch_size < 1:
        raise option_error(f"{where}: training.global_batch_size", batch_size, "must be a positive integer")
    evaluations = 2 if entry.settings.get("sampling.sampler") == "heun" else 1
    if not isinstance(num_steps, int) or not 0 < num_steps * evaluations <= MODEL_EVALUATIONS:
        right = (
            f"must be at most {MODEL_EVALUATIONS // evaluations}: a sample has {MODEL_EVALUATIONS} model evaluations"
        )
        raise option_error(f"{where}: sampling.num_steps", num_steps, right)
    if not isinstance(entry.images, int) or not 0 < entry.images <= BUDGET or entry.images % batch_size:
        right = f"must be a multiple of training.global_batch_size = {batch_size}, at most {BUDGET}"
        raise option_error(f"{where}: images", entry.images, right)
    if entry.rung is not None and (not isinstance(entry.rung, int) or entry.rung < 1):
        raise option_error(f"{where}: rung", entry.rung, "must be a positive integer")
    check_width(f"{where}: ema_width", entry.ema_width)


def check_width(name: str, width: float | None) -> None:
    """Refuse a width that no average has.

    Raises:
        ConfigError: it is not None, and not between 0 and that of a uniform average.
    """
    if width is not None and not (isinstance(width, float) and 0 < width < _UNIFORM_WIDTH):
        raise option_error(name, width, f"must be above 0 and below {_UNIFORM_WIDTH}, the width of a uniform average")
