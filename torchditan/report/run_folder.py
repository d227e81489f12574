# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A folder of run directories that no grid made, read as a grid: the axes are the options in which the runs differ.

Notable:
- options that only say where a run writes and what it logs are never axes (`_NO_AXES`);
- an option that the trainer completed, such as the global batch, is an axis only if the other axes do not explain it;
- a run is measured over the last fifth of its steps: 10 of 50, as in a grid and in the course project.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchditan.ablation.grid import PARALLEL, PRECISION, PRECISIONS, STANDARD_AXES
from torchditan.ablation.ledger import SCHEMA_VERSION, Row, measure, provenance_of
from torchditan.config.errors import ConfigError
from torchditan.config.loader import build_config
from torchditan.config.schema import options
from torchditan.config.trajectory import flatten_tree
from torchditan.run.reading import read_config, read_metrics, read_status

_REPLICATE, _SHARD = "training.data_parallel_replicate_degree", "training.data_parallel_shard_degree"
_NO_AXES = ("job", "metrics", "profiling", "comm", "checkpoint", "autotune", "cache")
_COMPLETED = (
    "training.global_batch_size",
    "model.input_channels",
    "model.sample_size",
    "dataset.num_classes",
    "dataset.fingerprint",
    "diffusion.timestep_shift",
)


def is_run_folder(folder: Path) -> bool:
    """Whether a folder contains run directories, and no grid made them."""
    return not (folder / "grid.json").exists() and any(folder.glob("*/config.json"))


def read_runs(folder: Path) -> tuple[dict[str, Any], list[Row], list[str]]:
    """Read the runs of a folder. Imported ones, which did not train, are left out.

    Returns:
        What the runs have in common, as in grid.json; rows as in a grid's ledger; the axes that are not standard.

    Raises:
        ConfigError: a config.json does not parse or does not belong to a run, or no run trained.
    """
    found = {file.parent: read_config(file.parent) for file in sorted(folder.glob("*/config.json"))}
    contents = {run: content for run, content in found.items() if "imported" not in content}
    if not contents:
        raise ConfigError(f"{folder} has only imported runs; must have runs of train.py")
    for run, content in contents.items():
        _check(run, content)
    settings = [_settings(content) for content in contents.values()]
    names = [name for name in settings[0] if name not in STANDARD_AXES and len(_values(settings, name)) > 1]
    axes = [name for name in names if name not in _COMPLETED]
    for name in (name for name in names if name in _COMPLETED):
        others = [*STANDARD_AXES, *axes]
        if len(_values(settings, *others, name)) > len(_values(settings, *others)):
            axes.append(name)
    kept = [*STANDARD_AXES, *axes]
    rows = [
        {**_row(run, content), **{axis: setting[axis] for axis in kept}}
        for (run, content), setting in zip(contents.items(), settings, strict=True)
    ]
    common = {name: settings[0][name] for name in settings[0] if len(_values(settings, name)) == 1}
    lengths = {name: rows[0][name] for name in ("steps", "window") if len({row[name] for row in rows}) == 1}
    return {"settings": common, **lengths}, rows, axes


def _check(run: Path, content: dict[str, Any]) -> None:
    """Refuse a config.json in which a value that is read has another type."""
    number = (content.get("hardware") or {}).get("device_count")
    if type(number) is not int or not 1 <= number < 2**31:
        raise ConfigError(f"{run}/config.json is damaged: hardware.device_count must be the number of devices")
    known = {name: value for name, value in flatten_tree(content["config"]).items() if name in options()}
    try:
        build_config(known)
    except ConfigError as error:
        raise ConfigError(f"{run}/config.json: {error}") from None


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    """Value of every option that can be an axis, and of the axes that stand for several options."""
    defaults = {name: option.default for name, option in options().items()}
    values = {**defaults, **flatten_tree(content["config"])}
    shard = values[_SHARD]
    if shard < 1:
        degrees = values[_REPLICATE] * values["training.context_parallel_degree"]
        shard = content["hardware"]["device_count"] // degrees
    found = {name: values[name] for name in defaults if name.split(".")[0] not in _NO_AXES}
    precision = (name for name, members in PRECISIONS.items() if members.items() <= found.items())
    found[PRECISION] = next(precision, values["training.mixed_precision_param"])
    found[PARALLEL] = f"{values[_REPLICATE]},{shard}"
    return {name: found[name] for name in found if name not in (_REPLICATE, _SHARD, *PRECISIONS["float32"])}


def _values(settings: Sequence[dict[str, Any]], *names: str) -> set[str]:
    return {repr([setting[name] for name in names]) for setting in settings}


def _row(run: Path, content: dict[str, Any]) -> Row:
    """The row of a run, without its axes."""
    num_devices, records, state = content["hardware"]["device_count"], read_metrics(run), read_status(run) or {}
    status, reason = state.get("state", "running"), state.get("reason")
    if status not in ("completed", "oom"):
        status, reason = "error", reason or f"its status.json says {status}"
    steps = records[-1]["step"] if records else 0
    window = max(1, steps // 5)
    last = [record for record in records[1:] if record["step"] > steps - window]
    measured = measure(records, window=len(last), num_devices=num_devices) if status == "completed" and last else {}
    if status == "completed" and not measured:
        status, reason = "error", f"it logged {len(records)} of {steps} steps, which is too few to measure"
    return {
        "schema_version": SCHEMA_VERSION,
        "grid": run.parent.name,
        "run_name": run.name,
        "repeat": 1,
        "status": status,
        "reason": reason,
        "num_devices": num_devices,
        "steps": steps,
        "window": window,
        **measured,
        "elapsed_s": records[-1].get("elapsed_s") if records else None,
        "started": content.get("started"),
        **provenance_of(run),
    }
