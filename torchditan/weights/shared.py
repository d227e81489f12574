# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Opens shared models: a folder that `torchditan share` wrote, one on the hub, or one that ships with the package.

The folder may be a stranger's. Only config.json and model.safetensors are read. Both must be plain files inside the
folder, the weights with the size and the SHA-256 that config.json states. Importing this module needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchditan.config.errors import ConfigError
from torchditan.config.loader import TRAIN_CONFIGS
from torchditan.run.atomic_files import sha256_of
from torchditan.run.hub import download_folder, is_on_hub, split_place
from torchditan.run.reading import check_folder, similar_folder

LIBRARY = "torchditan"
FORMAT_VERSION = 1
"""Raised when an older reader would misunderstand a folder."""
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
SHIPPED = TRAIN_CONFIGS / "models"
"""Shared folders that ship with the package, by name."""


@dataclass(frozen=True)
class SharedModel:
    """A shared folder whose files are complete."""

    folder: Path
    name: str
    """Of the folder, the repository or the shipped model."""
    digest: str
    """SHA-256 of the weights."""

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS_FILE


def is_shared(place: str | os.PathLike[str]) -> bool:
    """Whether this is a shared model: `hub:owner/name`, a shared folder, or the name of a shipped one.

    A path that exists always wins over a name. Nothing is downloaded or checked.
    """
    path = Path(place)
    if path.exists():
        return _library(path) == LIBRARY
    return is_on_hub(place) or os.fspath(place) in shipped_models()


def shipped_models() -> list[str]:
    """Names of the models that ship with the package."""
    return sorted(file.parent.name for file in SHIPPED.glob(f"*/{CONFIG_FILE}"))


def check_address(place: str | os.PathLike[str]) -> None:
    """Refuse an address of `open_weights` where nothing is; a command calls it before it imports torch.

    Raises:
        ConfigError: there is no such path, and it is no shared model.
    """
    path = Path(place)
    if path.name == CONFIG_FILE:
        check_folder(path, mark=CONFIG_FILE, what="a run directory")  # names the folder
    if not path.exists() and not is_shared(place):
        shipped = f", or one of the shipped models {', '.join(shipped_models())}" if shipped_models() else ""
        right = (
            "a run directory or a checkpoint in one, a .safetensors file, a shared folder, hub:owner/name"
            f"{shipped}{similar_folder(path, mark=CONFIG_FILE)}"
        )
        raise ConfigError(f"{path} does not exist; must be {right}")


def open_shared(place: str | os.PathLike[str]) -> SharedModel:
    """Find a shared model, download it if it is on the hub, and check its files.

    Raises:
        ConfigError: it does not exist, cannot be fetched, is no shared model, is of a newer version, or a file is
            missing, damaged or not allowed there.
    """
    text = os.fspath(place)
    if is_on_hub(text):
        folder = download_folder(text, kind="model", patterns=[CONFIG_FILE, WEIGHTS_FILE])
        return _check(folder, shown=text, name=split_place(text)[0].split("/")[1])
    if not Path(text).exists() and text in shipped_models():
        return _check(SHIPPED / text, shown=text, name=text)
    return _check(Path(text), shown=text, name=Path(text).resolve().name)


def refuse_existing(folder: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]) -> None:
    """Refuse to replace a folder by a shared one, unless it is a shared one and `overwrite` is set."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder} is not a folder; choose another name")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{folder} exists; choose another name, or replace a shared folder with --overwrite")
    if not is_ours(folder):
        raise ConfigError(f"{folder} exists and was not written by torchditan share; choose another name")


def _check(folder: Path, *, shown: str, name: str) -> SharedModel:
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{shown} is no model of TorchDiTan: it has no {CONFIG_FILE}")
    manifest = _read(folder, CONFIG_FILE, shown=shown)
    if not isinstance(manifest, dict) or manifest.get("library_name") != LIBRARY:
        raise ConfigError(f"{shown} is no model of TorchDiTan: {CONFIG_FILE} was not written by torchditan share")
    version = manifest.get("format_version")
    if type(version) is not int:
        raise ConfigError(f"{shown} is damaged: {CONFIG_FILE} has no format_version")
    if version > FORMAT_VERSION:
        made_by = str(manifest.get("torchditan_version"))[:20]
        right = f"was shared by torchditan {made_by} in format {version}; this one reads up to {FORMAT_VERSION}: update"
        raise ConfigError(f"{shown} {right}")
    files = manifest.get("files")
    if not isinstance(files, dict) or WEIGHTS_FILE not in files:
        raise ConfigError(f"{shown} is damaged: {CONFIG_FILE} lists no {WEIGHTS_FILE}")
    for file, entry in files.items():
        if file != WEIGHTS_FILE:
            raise ConfigError(f"{shown} is refused: {CONFIG_FILE} lists {file!r}; must be {WEIGHTS_FILE} only")
        _check_file(folder, file, entry, shown=shown)
    return SharedModel(folder, name, str(files[WEIGHTS_FILE]["sha256"]))


def _check_file(folder: Path, file: str, entry: Any, *, shown: str) -> None:
    size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    path = _inside(folder, file, shown=shown)
    if not path.is_file():
        raise ConfigError(f"{shown} is incomplete: {file} is missing; download or copy it again")
    if (found := path.stat().st_size) != size:
        raise ConfigError(f"{shown} is damaged: {file} has {found} bytes, not {size}; {_again(path)}")
    if sha256_of(path) != sha256:
        raise ConfigError(f"{shown} is damaged: the SHA-256 of {file} differs from {CONFIG_FILE}; {_again(path)}")


def _again(path: Path) -> str:
    is_cached = "snapshots" in path.parts and path.is_symlink()
    return f"delete {path.resolve()} and open it again" if is_cached else "download or copy it again"


def _inside(folder: Path, file: str, *, shown: str) -> Path:
    """The path of a file, which must not lead out of the folder. The hub's cache links to its own blobs."""
    places = [folder.resolve()]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.resolve().parent / "blobs")
    path = folder / file
    target = Path(os.path.realpath(path))  # Path.resolve fails for a link to itself before Python 3.13
    if not any(target.is_relative_to(place) for place in places):
        raise ConfigError(f"{shown} is refused: {file} is a link to another folder")
    return path


def _read(folder: Path, file: str, *, shown: str) -> Any:
    path = _inside(folder, file, shown=shown)
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{shown} is damaged: {file} does not parse; download or copy it again") from None


def _library(folder: Path) -> str | None:
    """`library_name` in config.json. If it is a link out of a folder with weights: ours, so that opening refuses it."""
    try:
        content = json.loads(_inside(folder, CONFIG_FILE, shown=str(folder)).read_bytes())
    except ConfigError:
        return LIBRARY if os.path.lexists(folder / WEIGHTS_FILE) else None
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("library_name") if isinstance(content, dict) else None
