# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Finds the weights of a published autoencoder: in a folder, or on the Hugging Face hub, downloaded once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchditan.config import options
from torchditan.errors import option_error
from torchditan.extras.autoencoders.catalogue import PUBLISHED
from torchditan.run.hub import fetch_files, is_hub_name


def place_of(config: options.Autoencoder, must_be: str) -> str:
    """`autoencoder.path`, or the location in the catalogue for an autoencoder of this name.

    Raises:
        ConfigError: there is neither; `must_be` describes a valid path.
    """
    entry = PUBLISHED.get(config.name or "")
    place = config.path or (None if entry is None else entry.hub_name)
    if place is None:
        raise option_error("autoencoder.path", None, f"must be given: {must_be}")
    return place


def find_weights(place: str, *, files: Sequence[str], subfolders: Sequence[str] = ("",)) -> Path:
    """The folder that contains all `files`. For a hub name, they are downloaded once, with a progress bar.

    Args:
        place: a folder, or `owner/name` on the hub, in the form of `autoencoder.path`.
        files: their names; the first one determines the subfolder.
        subfolders: where to look inside `place`, in order; "" is `place` itself.

    Raises:
        ConfigError: the folder or hub name does not exist, a file is missing, or the download fails.
    """
    local = Path(place).expanduser()
    if local.is_dir():
        return _find_here(local, place=place, files=files, subfolders=subfolders)
    if not is_hub_name(place):
        right = f"is not a folder; must be one with {' and '.join(files)}, or owner/name on the Hugging Face hub"
        raise option_error("autoencoder.path", place, right)
    return fetch_files(place, files=files, subfolders=subfolders, option="autoencoder.path")


def _find_here(local: Path, *, place: str, files: Sequence[str], subfolders: Sequence[str]) -> Path:
    folders = [local / subfolder for subfolder in subfolders]
    folder = next((folder for folder in folders if (folder / files[0]).is_file()), local)
    for file in files:
        if not (folder / file).is_file():
            inner = "" if folder == local else f"{folder.relative_to(local)}/"
            raise option_error("autoencoder.path", place, f"has no {inner}{file}; must hold {' and '.join(files)}")
    return folder
