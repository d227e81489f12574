# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reads run directories (configuration, status, metrics), and explains paths that are something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchditan.errors import ConfigError, nearest, some

_KINDS = {
    **dict.fromkeys(("hardware", "versions", "trajectory"), dict),
    **dict.fromkeys(("class_names", "command"), list),
    **dict.fromkeys(("run_id", "created", "started", "git_commit"), str),
}
"""Types of the other entries of config.json. An entry of another type counts as null."""


def check_folder(path: Path, *, mark: str, what: str) -> None:
    """Refuse a path that is not a folder of this kind, and suggest one that is.

    Args:
        path: as given by the user.
        mark: the file that every folder of this kind contains, such as config.json.
        what: the kind, for the message: "a run directory".

    Raises:
        ConfigError: the path does not exist, is a file, or lacks the mark.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; must be {what}{similar_folder(path, mark=mark)}")
    if not path.is_dir():
        hint = f"; did you mean {path.parent}?" if (path.parent / mark).is_file() else ""
        if path.suffix in (".safetensors", ".pt", ".pth", ".bin"):
            hint = f"; torchditan import {path} outputs/{path.stem} creates a run from it"
        raise ConfigError(f"{path} is a file; must be {what}{hint}")
    if not (path / mark).exists():
        inside = [str(child) for child in _children(path) if (child / mark).is_file()]
        hint = f"; it contains {some(inside)}" if inside else ""
        raise ConfigError(f"{path} is not {what}: it has no {mark}{hint}")


def similar_folder(path: Path, *, mark: str) -> str:
    """`; did you mean outputs/quickstart?`, or "". Looks next to the path, and in outputs/."""
    folders = [path.parent, path.parent / "outputs"]
    found = {
        child.name: child for folder in reversed(folders) for child in _children(folder) if (child / mark).is_file()
    }
    name = nearest(path.name, found)
    return f"; did you mean {found[name]}?" if name else ""


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of the run in folder `path`; ConfigError if there is none."""
    check_folder(Path(path), mark="config.json", what="a run directory")
    file = Path(path) / "config.json"
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} does not parse: {error}") from None
    config = content.get("config") if isinstance(content, dict) else None
    if config is not None:
        content |= {key: None for key, kind in _KINDS.items() if not isinstance(content.get(key, kind()), kind)}
    if not isinstance(config, dict) or not all(isinstance(section, dict) for section in config.values()):
        is_checkpoint = (Path(path) / "manifest.json").is_file()
        hint = "; a checkpoint needs its name, such as step-00000100" if is_checkpoint else ""
        raise ConfigError(f"{file} does not belong to a run: it contains no configuration{hint}")
    return content


def read_status(path: str | Path) -> dict[str, Any] | None:
    """status.json of the run in folder `path`; None if none was written, or it is damaged."""
    try:
        status = json.loads((Path(path) / "status.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    is_status = isinstance(status, dict) and isinstance(status.get("state"), str)
    return status if is_status and isinstance(status.get("reason"), str | None) else None


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl of the run in folder `path`; empty if none was written.

    Each has an integer `step`; the other values are numbers or null.
    """
    file = Path(path) / "metrics.jsonl"
    try:
        content = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    records = []
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # empty, incomplete after a kill, or damaged
            continue
        if isinstance(record, dict) and type(record.get("step")) is int and abs(record["step"]) < 2**63:
            records.append({name: value if _is_number(value) else None for name, value in record.items()})
    return records


def _is_number(value: Any) -> bool:
    """Whether this is a number that fits into a float, or null."""
    return value is None or isinstance(value, bool | float) or (type(value) is int and abs(value) < 2**1000)
