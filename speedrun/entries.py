# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Entries of the speedrun: one TOML each, `entries/NAME.toml` (README.md has the rules).

Notable:
- an entry is a training configuration with a section [entry]. It starts from the settings of its `base` and changes
  some, so a rung of the ladder is a few lines;
- what all entries share is in protocol.toml; an entry that sets one of these options is refused before any work;
- code of an entry is one file next to its TOML. Its `[registry]` lines are added to torchditan/registry.py's tables in
  the processes of this entry only.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan import registry
from torchditan.ablation.grid import as_flags
from torchditan.config.errors import ConfigError, did_you_mean, option_error
from torchditan.config.loader import options, read_toml

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
METRIC = "FD-EffNetLite0"

_SECTIONS = ("model", "diffusion", "optimizer", "lr_scheduler", "ema", "sampling")
_TRAINING = ("global_batch_size", "max_norm", "dense_ratio")
_FORBIDDEN = ("model.path", "sampling.guidance_scale", "ema.post_hoc_widths", "ema.post_hoc_interval")
_KEYS = ("title", "base", "images", "ema_width", "rung", "code", "registry")
STORED_WIDTHS = (0.05, 0.1)
"""`ema.post_hoc_widths` of entries with `ema_width`. Any width near them can be chosen from the same run."""
_NUM_SNAPSHOTS = 10


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
    rung: int | None = None
    """Position in the ladder; None for other entries."""
    ema_width: float | None = None
    """Width of the post-hoc average that is scored; None scores the run's own EMA, or its weights without one."""
    code: Path | None = None
    registry: dict[str, dict[str, str]] = field(default_factory=dict)
    """Lines for the tables of torchditan/registry.py: {"OBJECTIVES": {"mine": "my_file:MyObjective"}}."""

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
            settings["ema.post_hoc_widths"] = list(STORED_WIDTHS)
            settings["ema.post_hoc_interval"] = max(1, self.num_steps // _NUM_SNAPSHOTS)
        return [f"--job.config_file={PROTOCOL}", *as_flags(settings)]

    def definition(self) -> dict[str, Any]:
        """All that determines the result but the seed and the code, for the result's JSON."""
        return {
            "images": self.images,
            "ema_width": self.ema_width,
            "settings": dict(sorted(self.settings.items())),
            "code": None if self.code is None else self.code.read_text(encoding="utf-8"),
            "registry": self.registry,
        }

    @property
    def recipe(self) -> str:
        """The definition without the number of images: entries with equal recipes share a step time."""
        return hashlib.sha256(json.dumps(self.definition() | {"images": None}, sort_keys=True).encode()).hexdigest()[
            :12
        ]

    def register(self) -> None:
        """Add the entry's lines to the registries of this process, so that its options are known."""
        if self.code is not None:
            sys.path.insert(0, str(self.code.parent))
        for table, lines in self.registry.items():
            getattr(registry, table).update(lines)


def names() -> list[str]:
    """All entries, sorted."""
    return sorted(path.stem for path in ENTRIES.glob("*.toml"))


def load(name: str, changes: dict[str, Any] | None = None, *, folder: Path = ENTRIES) -> Entry:
    """Read an entry and what it inherits.

    Args:
        name: of its file, with or without `.toml`.
        changes: settings to replace, for tuning.
        folder: where entries are.

    Raises:
        ConfigError: the file does not exist, or breaks a rule.
    """
    entry = _load(name.removesuffix(".toml"), folder, inheriting=())
    if changes:
        entry = Entry(**{**vars(entry), "settings": {**entry.settings, **changes}})
    _check(entry)
    return entry


def _load(name: str, folder: Path, *, inheriting: tuple[str, ...]) -> Entry:
    path = folder / f"{name}.toml"
    if not path.is_file():
        known = [path.stem for path in folder.glob("*.toml")]
        raise ConfigError(f"{name} is not an entry in {folder.name}/{did_you_mean(name, known)}")
    if name in inheriting:
        raise ConfigError(f"{path.name}: base leads back to {name}; one of {', '.join(inheriting)} must have none")
    values = read_toml(path)
    own = {name.removeprefix("entry."): values.pop(name) for name in [*values] if name.startswith("entry.")}
    for key in own:
        if key not in _KEYS:
            raise ConfigError(f"{path.name}: {key} is not a key of [entry]; must be one of {', '.join(_KEYS)}")
    base = own.get("base")
    parent = None if base is None else _load(str(base), folder, inheriting=(*inheriting, name))
    settings = {**(parent.settings if parent else {}), **values}
    images = own.get("images", parent.images if parent else BUDGET)
    code = own.get("code")
    own_code = folder / str(code) if code is not None else None
    if own_code is not None and not own_code.is_file():
        raise option_error(f"{path.name}: code", code, f"must be a file in {folder.name}/")
    if own_code is not None and parent is not None and parent.code is not None:
        raise option_error(
            f"{path.name}: code", code, f"its base has {parent.code.name}; an entry has one file of code"
        )
    width = own.get("ema_width", parent.ema_width if parent else None)
    return Entry(
        name=name,
        title=str(own.get("title", name)),
        images=images,
        settings=settings,
        base=base,
        rung=own.get("rung"),
        ema_width=width or None,
        code=own_code or (parent.code if parent else None),
        registry={**(parent.registry if parent else {}), **own.get("registry", {})},
    )


def _check(entry: Entry) -> None:
    where = f"{entry.name}.toml"
    for table in entry.registry:
        if not isinstance(getattr(registry, table, None), dict):
            raise ConfigError(f"{where}: [registry] {table} is not a table of torchditan/registry.py")
    shared = read_toml(PROTOCOL)
    known = options()
    for option in entry.settings:
        if option not in known:
            raise ConfigError(f"{where}: {option} is not an option{did_you_mean(option, list(known))}")
        section, key = option.split(".")
        is_free = section in _SECTIONS or (section == "training" and key in _TRAINING)
        if option in shared or option in _FORBIDDEN or not is_free:
            raise ConfigError(f"{where}: the protocol fixes {option}; remove it")
    if "training.global_batch_size" not in entry.settings:
        raise ConfigError(f"{where}: training.global_batch_size is missing; the steps follow from it")
    num_steps = entry.settings.get("sampling.num_steps")
    if not isinstance(num_steps, int) or not 0 < num_steps <= MODEL_EVALUATIONS:
        right = f"must be an integer up to {MODEL_EVALUATIONS}, the model evaluations of a sample"
        raise option_error(f"{where}: sampling.num_steps", num_steps, right)
    if not isinstance(entry.images, int) or not 0 < entry.images <= BUDGET or entry.images % entry.batch_size:
        right = f"must be a multiple of training.global_batch_size = {entry.batch_size}, at most {BUDGET}"
        raise option_error(f"{where}: images", entry.images, right)
