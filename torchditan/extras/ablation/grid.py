# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A grid file (a base configuration, axes and exclusions) and the runs that it defines.

Notable:
- an axis is any option of the configuration, or an alias for several options (`ALIASES`). `parallel` and `precision`
  are the only way to set theirs. So a grid cannot compare DDP in one precision with FSDP in another by accident;
- every run is validated as a `Config` before anything starts, so a mistake does not cost a night. A combination is left
  out if it is impossible although each of its values is possible in another run;
- batch size is the innermost axis and ascends: after an out-of-memory run the larger batches are skipped. A repeat, or
  the next value of `training.seed`, runs the whole grid again, so that a machine that slows down affects all cells
  alike;
- nothing here imports torch.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchditan.config.declarations import Above, AtLeast
from torchditan.config.legacy_keys import adopt_file, adopt_legacy
from torchditan.config.loader import (
    TRAIN_CONFIGS,
    build_config,
    find_config,
    read_tables,
    read_toml,
    split_flavor,
    with_defaults,
)
from torchditan.config.options import Config, flatten
from torchditan.config.rules import missing_for_effect, validate
from torchditan.config.schema import Option, options, unknown_option
from torchditan.config.trajectory import flatten_tree
from torchditan.errors import ConfigError, did_you_mean, option_error
from torchditan.extras.published.resolutions import (
    MODEL,
    RESOLUTION,
    published_options,
    resolution_numbers,
    resolution_of,
)

FLAVOR, PATCH_SIZE, BATCH_SIZE = "model.flavor", "model.patch_size", "training.batch_size"
CHECKPOINTING, COMPILE = "activation_checkpoint.mode", "training.compile"
PARALLEL, PRECISION = "parallel", "precision"
CHECKPOINT_FRACTION = "checkpoint_fraction"
SEED = "training.seed"
"""As an axis: runs that differ only in it are repetitions of one cell, not another setting."""
STANDARD_AXES = (FLAVOR, PATCH_SIZE, BATCH_SIZE, PARALLEL, CHECKPOINTING, COMPILE, PRECISION)
"""Columns of every ledger, even if the grid does not vary them."""
_ALWAYS_NAMED = (*STANDARD_AXES, SEED, MODEL, RESOLUTION, CHECKPOINT_FRACTION)

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"training.mixed_precision_param": "float32", "float8.enable_float8_linear": False},
    "float16": {"training.mixed_precision_param": "float16", "float8.enable_float8_linear": False},
    "bfloat16": {"training.mixed_precision_param": "bfloat16", "float8.enable_float8_linear": False},
    "bfloat16_f8": {"training.mixed_precision_param": "bfloat16", "float8.enable_float8_linear": True},
    "auto": {"training.mixed_precision_param": "auto", "float8.enable_float8_linear": False},
}
_REPLICATE, _SHARD = "training.data_parallel_replicate_degree", "training.data_parallel_shard_degree"
_FRACTION = "activation_checkpoint.fraction"


@dataclass(frozen=True)
class Alias:
    """An axis that sets several options."""

    members: tuple[str, ...]
    """Options that it sets. A grid that uses the alias cannot set them otherwise."""
    expand: Callable[[Mapping[str, Any]], dict[str, Any]]
    """The options, from the values of a cell."""
    read: Callable[[Config], Any]
    """The value of the alias in a configuration."""
    kind: type = str
    is_only_way: bool = False
    """Whether no grid can set the options otherwise."""


def parallel_degrees(parallel: str) -> tuple[int, int]:
    """`"2,4"` as (replicate, shard)."""
    words = str(parallel).replace(" ", "").split(",")
    if len(words) != 2 or not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise option_error(PARALLEL, parallel, 'must be "replicate,shard", for example "2,4"')
    return int(words[0]), int(words[1])


def _expand_precision(values: Mapping[str, Any]) -> dict[str, Any]:
    precision = values[PRECISION]
    if not isinstance(precision, str) or precision not in PRECISIONS:
        right = f"must be one of {', '.join(PRECISIONS)}{did_you_mean(str(precision), PRECISIONS)}"
        raise option_error(PRECISION, precision, right)
    return PRECISIONS[precision]


def _read_precision(config: Config) -> str:
    return "bfloat16_f8" if config.float8.enable_float8_linear else config.training.mixed_precision_param


def _read_parallel(config: Config) -> str:
    training = config.training
    return f"{training.data_parallel_replicate_degree},{max(training.data_parallel_shard_degree, 1)}"


def _read_fraction(config: Config) -> float | None:
    checkpointing = config.activation_checkpoint
    return checkpointing.fraction if checkpointing.mode == "fraction" else None


ALIASES = {
    PARALLEL: Alias(
        (_REPLICATE, _SHARD),
        lambda values: dict(zip((_REPLICATE, _SHARD), parallel_degrees(values[PARALLEL]), strict=True)),
        _read_parallel,
        is_only_way=True,
    ),
    PRECISION: Alias(tuple(PRECISIONS["float32"]), _expand_precision, _read_precision, is_only_way=True),
    MODEL: Alias(
        (
            "model.name",
            FLAVOR,
            "model.input_channels",
            "dataset.image_size",
            "dataset.num_frames",
            "dataset.num_classes",
            "diffusion.objective",
        ),
        lambda values: published_options(values[MODEL], values.get(RESOLUTION)),
        lambda config: f"{config.model.name}/{config.model.flavor}",
    ),
    RESOLUTION: Alias((), lambda values: {}, resolution_of),  # of a model
    CHECKPOINT_FRACTION: Alias(
        (CHECKPOINTING, _FRACTION),
        lambda values: {CHECKPOINTING: "fraction", _FRACTION: values[CHECKPOINT_FRACTION]},
        _read_fraction,
        float,
    ),
}

FORCED: dict[str, Any] = {
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "metrics.legacy_tags": False,
    "metrics.enable_wandb": False,
    "metrics.enable_trackio": False,
    "profiling.enable_profiling": False,
    "profiling.enable_memory_snapshot": False,
    "checkpoint.enable_checkpoint": False,
    "checkpoint.save_final": False,
}
"""Options of every run: it logs each step, and writes nothing else that takes time."""
OFF: dict[str, Any] = {"metrics.enable_sampling": False, "validation.freq": 0, "evaluation.freq": 0}
"""Unless a setting of the grid changes it, whatever its base file says."""
RUNNER_SETS = (
    "job",
    "metrics",
    "validation",
    "evaluation",
    "checkpoint",
    "sampling",
    "profiling",
    "autotune",
    "training.steps",
)
"""Sections and options that a grid cannot set: the runner sets them or they do not affect measurements."""
_DRAWING = ("metrics.enable_sampling", "metrics.sample_freq", "metrics.sample_batch_size")
_ALSO_SETTINGS = ("autotune", "validation", "evaluation", "sampling", *_DRAWING)
"""Those of them that may be settings, because they decide what is measured, but not axes."""

OPTIONS = {
    option.name: option
    for option in (
        Option(str, "base", description="configuration of all runs", optional=True),
        Option(int, "steps", description="optimizer steps per run", rules=(AtLeast(1),)),
        Option(int, "window", description="number of last steps to measure", rules=(AtLeast(1),)),
        Option(int, "repeats", description="number of times to run the whole grid", rules=(AtLeast(1),)),
        Option(float, "timeout_s", description="time limit of a run in seconds", rules=(Above(0),)),
        Option(
            str,
            "autotune",
            description="search for the batch size: largest or fastest",
            optional=True,
            choices=("largest", "fastest"),
        ),
        Option(
            float,
            "memory_limit_gib",
            description="memory limit of a rank on a CPU",
            optional=True,
            rules=(Above(0),),
        ),
        Option(bool, "one_at_a_time", description="vary one axis at a time"),
    )
}
"""Keys of a grid file, besides its tables."""
_TABLES = ("exclude", "axes", "settings")


@dataclass(frozen=True)
class Run:
    """One run of one cell of the grid."""

    name: str
    repeat: int
    axes: dict[str, Any]
    """Value of every axis, including the standard ones, by option or alias."""
    flags: dict[str, Any]
    """Options of `train.py` that override the base file."""
    config: Config

    @property
    def num_devices(self) -> int:
        replicate, shard = parallel_degrees(self.axes[PARALLEL])
        return replicate * shard * self.config.training.context_parallel_degree

    @functools.cached_property
    def cell(self) -> tuple[Any, ...]:
        """Identifies runs that differ only in batch size, seed and repeat."""
        return tuple(json.dumps(value) for axis, value in self.axes.items() if axis not in (BATCH_SIZE, SEED))


def is_grid(content: Any) -> bool:
    """Whether a grid.json, which may be a stranger's, has the types of a grid. Keys may be missing."""
    if not isinstance(content, dict):
        return False
    name, axes, settings = (content.get(key, empty) for key, empty in (("name", ""), ("axes", {}), ("settings", {})))
    return (
        isinstance(name, str)
        and isinstance(axes, dict)
        and all(isinstance(values, list) and values for values in axes.values())
        and isinstance(settings, dict)
    )


@dataclass(frozen=True)
class Grid:
    """A resolved grid file."""

    name: str
    axes: dict[str, list[Any]]
    settings: dict[str, Any]
    exclude: list[dict[str, Any]]
    base: str | None = None
    steps: int = 50
    window: int = 10
    repeats: int = 1
    timeout_s: float = 3600.0
    autotune: str | None = None
    memory_limit_gib: float | None = None
    one_at_a_time: bool = False
    """Only the first value of every axis, and the cells that differ from these in one axis."""

    @property
    def columns(self) -> list[str]:
        """Axes of the ledger: the standard ones, those of the grid, and the resolution if the grid has a model axis."""
        own = [axis for axis in self.axes if axis not in STANDARD_AXES]
        return [*STANDARD_AXES, *own, *([RESOLUTION] if MODEL in own and RESOLUTION not in own else [])]

    def runs(self) -> list[Run]:
        """All runs, in execution order. Impossible combinations of values that are possible elsewhere are left out.

        Raises:
            ConfigError: a value is not valid in any cell, or the exclusions leave no run.
        """
        runs, _ = self._runs_and_impossible
        return [
            *runs,
            *(replace(run, repeat=r, name=f"{run.name}_r{r}") for r in range(2, self.repeats + 1) for run in runs),
        ]

    @property
    def left_out(self) -> str | None:
        """A line on the combinations that `runs` leaves out as impossible; None without any."""
        runs, impossible = self._runs_and_impossible
        count = f"{len(impossible)} of {len(runs) + len(impossible)} combinations are impossible and left out"
        return f"{count}, such as {impossible[0]}" if impossible else None

    @functools.cached_property
    def base_options(self) -> dict[str, Any]:
        """The options of the base file by name."""
        return _read_base(self.base)

    @functools.cached_property
    def _runs_and_impossible(self) -> tuple[list[Run], list[str]]:
        """The runs without repeats, and for each cell that is left out a line with its values and the reason."""
        base = self.base_options
        axes = {SEED: self.axes[SEED], **self.axes} if SEED in self.axes else dict(self.axes)  # the outermost
        batches = sorted(axes.pop(BATCH_SIZE), key=_batch_order) if BATCH_SIZE in axes else None
        cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        if batches is not None:
            cells = [{**cell, BATCH_SIZE: batch} for cell in cells for batch in batches]
        if self.one_at_a_time:
            cells = [cell for cell in cells if self._num_changes(cell) <= 1]
        # Cells excluded by their axes need not be valid configurations.
        cells = [cell for cell in cells if not self._matches({**self.settings, **cell}.get)]
        runs, possible = [], set()
        wrong: list[tuple[set[tuple[str, str]], str]] = []
        for cell in cells:
            values = {(axis, json.dumps(value)) for axis, value in cell.items()}
            try:
                run = self._run(cell, base)
            except ConfigError as error:
                wrong.append((values, f"{_cell_name(cell)}: {error}"))
                continue
            if not self._is_excluded(run):
                runs.append(run)
                possible |= values
        for values, reason in wrong:
            if not values <= possible:  # a mistake, not a combination
                raise ConfigError(f"{self.name}, {reason}")
        if not runs:
            raise ConfigError(f"{self.name} is an empty grid: every run is excluded, or an axis has no values")
        _check_effects(self.axes, runs)
        return runs, [reason for _, reason in wrong]

    def _run(self, cell: dict[str, Any], base: dict[str, Any]) -> Run:
        values: dict[str, Any] = {"dataset.dataset_name": "dummy"} if "dataset.dataset_name" not in base else {}
        values |= {PARALLEL: "1,1"} if self.base is None else {}
        if SEED in cell:  # a repetition draws its samples anew, so that evaluations are independent too
            values["evaluation.seed"] = base.get("evaluation.seed", 1) + cell[SEED]
        values |= {**OFF, **self.settings, **cell, "training.steps": self.steps, **FORCED}
        if self.autotune is not None:
            values |= {BATCH_SIZE: "auto", "autotune.goal": self.autotune}
        flags = _expand_aliases(values)
        config = with_defaults({**base, **flags})
        axes = {axis: _axis_value(config, axis) for axis in self.columns}
        validate(config)
        others = set(axes).difference(_ALWAYS_NAMED) if self.one_at_a_time else ()  # ten are too long for a file name
        name = run_name(axes, left_out={axis for axis in others if axes[axis] == self.axes[axis][0]})
        return Run(name=name, repeat=1, axes=axes, flags=flags, config=config)

    def _num_changes(self, cell: dict[str, Any]) -> int:
        """Number of axes whose value is not their first; a seed is not a setting."""
        return sum(value != self.axes[axis][0] for axis, value in cell.items() if axis != SEED)

    def _is_excluded(self, run: Run) -> bool:
        return self._matches(functools.partial(_axis_value, run.config))

    def _matches(self, value_of: Callable[[str], Any]) -> bool:
        """Whether any exclusion matches these values."""

        def matches(key: str, wanted: Any) -> bool:
            return value_of(key) in (wanted if isinstance(wanted, list) else [wanted])

        return any(all(matches(key, wanted) for key, wanted in rule.items()) for rule in self.exclude)


def run_name(axes: Mapping[str, Any], *, left_out: Collection[str] = ()) -> str:
    """`dit-l_bs16_ps2_actselective_ctrue_dbfloat16_p1,8`, then other axes as `_key-value`, except those `left_out`.

    For a published model: `flux-flux.1-dev_512x512_bs1_act0.5_ctrue_dbfloat16_p1,8`.
    """
    flavor, patch_size = axes[FLAVOR].lower(), f"_ps{axes[PATCH_SIZE]}"
    if MODEL in axes:
        flavor, patch_size = f"{_file_name(axes[MODEL]).lower()}_{axes[RESOLUTION]}", ""
    checkpointing = axes[CHECKPOINTING] if axes.get(CHECKPOINT_FRACTION) is None else f"{axes[CHECKPOINT_FRACTION]:g}"
    name = (
        f"{flavor}_bs{axes[BATCH_SIZE]}{patch_size}_act{checkpointing}"
        f"_c{str(axes[COMPILE]).lower()}_d{axes[PRECISION]}_p{axes[PARALLEL]}"
    )
    named = (*STANDARD_AXES, CHECKPOINT_FRACTION, *((MODEL, RESOLUTION) if MODEL in axes else ()))
    further = [axis for axis in axes if axis not in named]
    keys = [axis.split(".")[-1] for axis in further]
    for axis, key in zip(further, keys, strict=True):
        if axis not in left_out:
            name += f"_{key if keys.count(key) == 1 else axis}-{_file_name(axes[axis])}"
    return name


def load_grid(
    name: str, *, axes: Mapping[str, list[Any]] | None = None, overrides: Mapping[str, Any] | None = None
) -> Grid:
    """Load a grid file, given as a path or a name in train_configs/ablations/, and apply axes and settings to it.

    Args:
        name: `outputs/my.toml`, or `0.5B`.
        axes: axes to replace or add, `{"training.batch_size": [1, 2]}`.
        overrides: top-level keys of the file by name (`steps`, `window`, ...), and options as settings.

    Raises:
        ConfigError: the file does not exist, or has unknown keys or axes, or invalid values.
    """
    path = _find_grid(name)
    tables = read_tables(path, option="GRID")  # not of sections, unlike that of a job
    known = (*OPTIONS, *_TABLES)
    unknown = [key for key in tables if key not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known) or f"; there are {', '.join(known)}"
        raise ConfigError(f"{path}: {unknown[0]} is not a key of a grid{hint}")
    rules = tables.get("exclude", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise option_error("exclude", rules, "must be tables, [[exclude]]")
    settings = {key: value for key, value in (overrides or {}).items() if key not in OPTIONS}
    scalars = {key: value for key, value in (overrides or {}).items() if key in OPTIONS}
    file_axes = _flatten_table(path, "axes", tables)
    if "autotune" in scalars:
        file_axes.pop(BATCH_SIZE, None)
    grid = Grid(
        name=path.stem,
        axes={**file_axes, **(axes or {})},
        settings={**_flatten_table(path, "settings", tables), **settings},
        exclude=[flatten_tree(rule) for rule in rules],
        **{key: _converted(OPTIONS[key], value) for key, value in {**tables, **scalars}.items() if key in OPTIONS},
    )
    _check_grid(grid)
    _check_keys(grid)
    return replace(
        grid,
        axes={axis: _check_axis(axis, values) for axis, values in grid.axes.items()},
        exclude=[{key: _check_axis(key, values) for key, values in rule.items()} for rule in grid.exclude],
    )


def _converted(option: Option, value: Any) -> Any:
    converted = option.convert(value)
    if not option.allows(converted):
        raise option_error(option.name, value, option.expected)
    return converted


def _find_grid(name: str) -> Path:
    folder = TRAIN_CONFIGS / "ablations"
    for path in (Path(name).expanduser(), folder / name, folder / f"{name}.toml"):
        if name and path.is_file():
            return path
    names = sorted(path.stem for path in folder.glob("*.toml"))
    hint = did_you_mean(Path(name).stem, names)
    raise ConfigError(f"{name} is not a grid file; train_configs/ablations/ has {', '.join(names)}{hint}")


def _read_base(name: str | None) -> dict[str, Any]:
    return {} if name is None else adopt_legacy(adopt_file(split_flavor(read_toml(find_config(name))))[0])[0]


def _flatten_table(path: Path, key: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    table = tables.get(key, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {key} must be a table, [{key}]")
    return flatten_tree(table)


def _check_grid(grid: Grid) -> None:
    if grid.window >= grid.steps:
        right = (
            f"must be less than steps = {grid.steps}: the first step, which compiles and warms up, is never measured"
        )
        raise option_error("window", grid.window, right)
    if grid.autotune is not None and BATCH_SIZE in {*grid.axes, *grid.settings}:
        raise ConfigError(f"{BATCH_SIZE} is set by autotune; leave it out of the grid")
    if not grid.axes:
        raise ConfigError(f"{grid.name} is an empty grid: it has no axes")
    both = sorted(grid.axes.keys() & grid.settings.keys())
    if both:
        raise ConfigError(f"{both[0]} is an axis and a setting; keep one")
    if RESOLUTION in {*grid.axes, *grid.settings} and MODEL not in {*grid.axes, *grid.settings}:
        raise ConfigError(f"{RESOLUTION} needs a published model: set {MODEL}, for example flux/FLUX.1-dev")


def _check_keys(grid: Grid) -> None:
    used = {*grid.axes, *grid.settings}
    tables = [("axes", grid.axes), ("settings", grid.settings), *(("exclude", rule) for rule in grid.exclude)]
    for place, key in ((place, key) for place, keys in tables for key in keys):
        if key not in options() and key not in ALIASES:
            hint = did_you_mean(key, ALIASES)
            raise ConfigError(f"{place}: {key} is not an option{hint}" if hint else f"{place}: {unknown_option(key)}")
        for name, alias in ALIASES.items():
            if key in alias.members and (alias.is_only_way or (name in used and place != "exclude")):
                raise ConfigError(f"{place}: {key} is set by {name}; use that")
        names = {key, key.split(".")[0]}
        is_allowed = place == "exclude" or (place == "settings" and names & {*_ALSO_SETTINGS})
        if names & {*RUNNER_SETS} and not is_allowed:
            right = "cannot be set in a grid: the runner sets it, or it does not affect measurements"
            raise ConfigError(f"{place}: {key} {right}")


def _check_axis(axis: str, values: Any) -> list[Any]:
    """Values of an axis, converted to the types of the configuration."""
    listed = values if isinstance(values, list) else [values]
    if axis == BATCH_SIZE and "auto" in listed:
        raise option_error(f"axes.{axis}", listed, 'must be integers; to search, set autotune = "largest" instead')
    return [_checked_value(axis, value) for value in listed]


def _checked_value(axis: str, value: Any) -> Any:
    if axis == RESOLUTION:  # checked further together with the model
        resolution_numbers(value)
        return value
    return _axis_value(build_config(_expand_aliases({axis: value})), axis)


def _expand_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    flags = {key: value for key, value in values.items() if key not in ALIASES}
    for name, alias in ALIASES.items():
        if name in values:
            flags |= alias.expand(values)
    return flags


def _axis_value(config: Config, axis: str) -> Any:
    if axis in ALIASES:
        return ALIASES[axis].read(config)
    if axis == BATCH_SIZE:
        return config.training.batch_size_on(math.prod(parallel_degrees(_read_parallel(config))))
    return flatten(config)[axis]


def _check_effects(axes: Mapping[str, list[Any]], runs: list[Run]) -> None:
    """Refuse an axis that has no effect in any run: its table would show only noise."""
    for axis in axes:
        needs = [missing_for_effect(run.config, axis) for run in runs]
        if all(needs):
            raise option_error(f"axes.{axis}", axes[axis], f"has no effect in any run: it needs {needs[0]}")


def _batch_order(batch: Any) -> int:
    return batch if isinstance(batch, int) else 0


def _cell_name(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in cell.items())


def _file_name(value: Any) -> str:
    """A value as part of a folder name."""
    text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
    text = text.lower() if isinstance(value, bool) or value is None else text
    return re.sub(r"[^A-Za-z0-9.,+-]", "-", text)


def parse_axis(axis: str, words: Iterable[str]) -> list[Any]:
    """Values of `--axes.KEY 1,2,4` or `--axes.parallel 1,8 8,1`. Splits at commas unless values contain commas."""
    option = options().get(axis)
    split = [word for text in words for word in ([text] if axis == PARALLEL else re.split(r"[,\s]+", text)) if word]
    if option is not None and option.is_list:
        return [[_parse_value(axis, part) for part in word.split("x")] for word in split]
    return [_parse_value(axis, word) for word in split]


def _parse_value(axis: str, text: str) -> Any:
    """Parse command-line text as a TOML value. Text that is not a valid value stays a string and is refused later."""
    option = Option(ALIASES[axis].kind) if axis in ALIASES else options().get(axis)
    return text if option is None or text == "none" else option.parse(text)


def parse_setting(option: str, text: str) -> Any:
    """The value of `--settings.section.key TEXT`."""
    known = options().get(option)
    if known is not None and known.is_list:
        return [_parse_value(option, word) for word in re.split(r"[,\s]+", re.sub(r'[][" ]', " ", text)) if word]
    return _parse_value(option, text)
