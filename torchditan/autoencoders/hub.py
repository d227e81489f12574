# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Finds the weights of a published autoencoder: in a folder, or on the Hugging Face hub, downloaded once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchditan.autoencoders.catalogue import PUBLISHED
from torchditan.config import options
from torchditan.config.errors import option_error
from torchditan.config.optional_libraries import import_optional


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
    if local.exists() or re.fullmatch(r"\w[\w.-]*/[\w.-]+", place) is None:
        right = f"is not a folder; must be one with {_listed(files)}, or owner/name on the Hugging Face hub"
        raise option_error("autoencoder.path", place, right)
    return _find_on_hub(place, files=files, subfolders=subfolders)


def require(module: str) -> Any:
    """Import diffusers or huggingface_hub; the error explains how to install them."""
    return import_optional(module, extra="diffusers")


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _listed(files: Sequence[str]) -> str:
    return " and ".join(files)


def _find_here(local: Path, *, place: str, files: Sequence[str], subfolders: Sequence[str]) -> Path:
    folders = [local / subfolder for subfolder in subfolders]
    folder = next((folder for folder in folders if (folder / files[0]).is_file()), local)
    for file in files:
        if not (folder / file).is_file():
            inner = "" if folder == local else f"{folder.relative_to(local)}/"
            raise option_error("autoencoder.path", place, f"has no {inner}{file}; must hold {_listed(files)}")
    return folder


def _find_on_hub(place: str, *, files: Sequence[str], subfolders: Sequence[str]) -> Path:
    hub = require("huggingface_hub")
    errors = require("huggingface_hub.errors")  # a lazy submodule, so it must be imported
    missing = errors.EntryNotFoundError  # also covers its offline form, LocalEntryNotFoundError
    try:
        for subfolder in subfolders[:-1]:
            try:
                return _fetch(hub, place, files=files, subfolder=subfolder)
            except missing:
                continue
        return _fetch(hub, place, files=files, subfolder=subfolders[-1])
    except Exception as error:  # connection errors depend on the hub's version: OSError, httpx, requests
        right = why_not_fetched(error, what=_listed(files), option="--autoencoder.path")
        raise option_error("autoencoder.path", place, right) from error


def _fetch(hub: Any, place: str, *, files: Sequence[str], subfolder: str) -> Path:
    paths = [Path(hub.hf_hub_download(place, file, subfolder=subfolder or None)) for file in files]
    return paths[0].parent


def why_not_fetched(error: Exception, *, what: str, option: str) -> str:
    """Why `what` could not be fetched from the hub, and what to do. `option` may name a folder instead."""
    errors = require("huggingface_hub.errors")
    here = f"give a folder with {what} as {option}"
    if isinstance(error, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError, so check it first
        return "is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is not a folder here, and was not found on the Hugging Face hub (a private one needs HF_TOKEN)"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            "is neither a folder here nor in the hub's cache, and the Hugging Face hub cannot be reached "
            f"(no network, or HF_HUB_OFFLINE is set); go online once, or {here}"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return f"has no {what} on the Hugging Face hub"
    return f"cannot be fetched from the Hugging Face hub ({first_line(error)}); try again, or {here}"
