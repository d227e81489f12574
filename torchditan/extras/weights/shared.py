# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Finds shared models: a folder that `torchditan share` wrote, one on the hub, or one that ships with the package.

The folder may be a stranger's. Only config.json and model.safetensors are read. Both must be plain files inside the
folder, the weights with the SHA-256 that config.json states. Importing this module needs no torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from torchditan.config.loader import TRAIN_CONFIGS
from torchditan.errors import ConfigError
from torchditan.run.atomic_files import sha256_of
from torchditan.run.hub import download_folder, is_on_hub, split_place
from torchditan.run.reading import check_folder, similar_folder

LIBRARY = "torchditan"
"""`library_name` in config.json of a shared model."""
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
SHIPPED = TRAIN_CONFIGS / "models"
"""Shared folders that ship with the package, by name."""


class SharedModel(NamedTuple):
    """The weights of a shared folder, which are complete."""

    weights: Path
    name: str
    """Of the folder, the repository or the shipped model."""
    digest: str
    """SHA-256 of the weights."""


def is_shared(place: str | os.PathLike[str]) -> bool:
    """Whether this is a shared model: `hub:owner/name`, a shared folder, or the name of a shipped one.

    A path that exists always wins over a name. Nothing is downloaded or checked.
    """
    if Path(place).exists():
        return _description(Path(place)) is not None
    return is_on_hub(place) or os.fspath(place) in shipped_models()


def shipped_models() -> list[str]:
    """Names of the models that ship with the package."""
    return sorted(file.parent.name for file in SHIPPED.glob(f"*/{CONFIG_FILE}"))


def check_address(place: str | os.PathLike[str]) -> None:
    """Refuse an address of `open_weights` where nothing is; a command calls it before it imports torch.

    Raises:
        ConfigError: the path does not exist, and it is not a shared model.
    """
    path = Path(place)
    if path.name == CONFIG_FILE:
        check_folder(path, mark=CONFIG_FILE, what="a run directory")  # names the folder
    if not path.exists() and not is_shared(place):
        right = (
            "a run directory or a checkpoint in one, a .safetensors file, a shared folder, hub:owner/name, or one of "
            f"the shipped models {', '.join(shipped_models())}{similar_folder(path, mark=CONFIG_FILE)}"
        )
        raise ConfigError(f"{path} does not exist; must be {right}")


def find_shared(place: str | os.PathLike[str]) -> SharedModel:
    """Find a shared model, download it if it is on the hub, and check its weights.

    Raises:
        ConfigError: it does not exist, cannot be fetched, is not a shared model, or its weights are missing, damaged or
            a link to another folder.
    """
    text, folder = os.fspath(place), Path(place)
    name = folder.resolve().name
    if is_on_hub(text):
        folder = download_folder(text, kind="model", patterns=[CONFIG_FILE, WEIGHTS_FILE])
        name = split_place(text)[0].split("/")[1]
    elif not folder.exists():
        folder = SHIPPED / text
    description, weights = _description(folder), folder / WEIGHTS_FILE
    if description is None:
        raise ConfigError(f"{text} is no model of TorchDiTan: it has no {CONFIG_FILE} that torchditan share wrote")
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not _is_inside(folder, folder / file):
            raise ConfigError(f"{text} is refused: {file} is a link to another folder")
    if not weights.is_file():
        raise ConfigError(f"{text} is incomplete: {WEIGHTS_FILE} is missing; download or copy it again")
    if (digest := sha256_of(weights)) != description.get("sha256"):
        again = f"delete {weights.resolve()} and open it again" if weights.is_symlink() else "download or copy it again"
        raise ConfigError(f"{text} is damaged: the SHA-256 of {WEIGHTS_FILE} differs from {CONFIG_FILE}; {again}")
    return SharedModel(weights, name, digest)


def _is_inside(folder: Path, file: Path) -> bool:
    """Whether a file is in its folder, or is a link of the hub's cache to its own blobs."""
    places = [folder.resolve()]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.resolve().parent / "blobs")
    target = Path(os.path.realpath(file))  # Path.resolve fails for a link to itself before Python 3.13
    return any(target.is_relative_to(place) for place in places)


def _description(folder: Path) -> dict[str, Any] | None:
    """config.json of a shared folder; None for another folder."""
    try:
        content = json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("library_name") == LIBRARY else None
