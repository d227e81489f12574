# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files on the Hugging Face hub: download them once, and upload a folder. huggingface_hub does the transfer.

The token, the cache and the endpoint are those of huggingface_hub: HF_TOKEN, HF_HOME and so on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torchditan.config.optional_libraries import import_optional
from torchditan.errors import ConfigError, first_line, option_error

PREFIX = "hub:"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)

Kind = Literal["model", "dataset"]


def is_on_hub(place: str | os.PathLike[str]) -> bool:
    """Whether this is `hub:owner/name`. A path of this name wins."""
    return os.fspath(place).startswith(PREFIX) and not Path(place).exists()


def split_place(place: str) -> tuple[str, str | None]:
    """`hub:owner/name@revision` -> (owner/name, revision or None).

    Raises:
        ConfigError: it has another form.
    """
    name, at, revision = place.removeprefix(PREFIX).partition("@")
    if not is_name(name) or (at and (not _REVISION.fullmatch(revision) or ".." in revision)):
        raise ConfigError(f"{place} is not a place on the hub; must be hub:owner/name or hub:owner/name@revision")
    return name, revision if at else None


def is_name(text: str) -> bool:
    """Whether this has the form owner/name."""
    return _NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def is_hub_name(place: str) -> bool:
    """Whether this is `owner/name`, and no local file or folder of that name exists."""
    return is_name(place) and not Path(place).exists()


def download_folder(place: str, *, kind: Kind, patterns: Sequence[str]) -> Path:
    """Download the files of `hub:owner/name` that match these patterns, once, and return the local folder.

    Args:
        place: `hub:owner/name`, or with `@revision` (a branch, tag or commit).
        kind: of the repository.
        patterns: names of files, with * for any text.

    Raises:
        ConfigError: it does not exist or cannot be fetched.
    """
    name, revision = split_place(place)
    hub = _hub()
    try:
        return Path(hub.snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # connection errors depend on the hub's version: OSError, httpx, requests
        raise ConfigError(f"{place} {_why(error, what=kind)}") from error


def fetch(place: str, *, patterns: Sequence[str], what: str, option: str) -> Path:
    """The place on this machine that an option names: a path, or the files of `owner/name`, downloaded once.

    Args:
        patterns: names of files to download, with * for any text.
        what: what the folder holds, for messages.

    Raises:
        ConfigError: as `download_folder`, and names the option.
    """
    if not is_hub_name(place):
        return Path(place).expanduser()
    hub = _hub()
    try:
        return Path(hub.snapshot_download(place, allow_patterns=list(patterns), ignore_patterns="*.fp16*"))
    except Exception as error:
        raise option_error(option, place, _why(error, what=what, instead=option)) from error


def fetch_files(name: str, *, files: Sequence[str], subfolders: Sequence[str], option: str) -> Path:
    """The first of these subfolders that has all files, from `owner/name` in an option; "" is the main folder.

    Raises:
        ConfigError: as `fetch`, or no subfolder has the files.
    """
    hub, errors = _hub(), _hub_errors()
    missing: Exception | None = None
    for subfolder in subfolders:
        try:
            paths = [Path(hub.hf_hub_download(name, file, subfolder=subfolder or None)) for file in files]
            return paths[0].parent
        except errors.EntryNotFoundError as error:  # also its offline form, LocalEntryNotFoundError
            missing = error
        except Exception as error:
            missing = error
            break
    assert missing is not None
    raise option_error(option, name, _why(missing, what=" and ".join(files), instead=option)) from missing


def check_upload(name: str) -> None:
    """Check, before slow work, that an upload can start: the name, the library and a token.

    Raises:
        ConfigError: one of them is missing.
    """
    if not is_name(name):
        raise ConfigError(f"--push {name} is not a name on the hub; must be owner/name")
    if _hub().get_token() is None:
        raise ConfigError(
            f"--push {name} needs a token with write access: set HF_TOKEN, or log in with `hf auth login`"
        )


def upload_folder(folder: Path, name: str, *, kind: Kind, message: str, is_private: bool | None) -> str:
    """Create the repository if it does not exist, and upload all files of a folder as one commit.

    `is_private` None leaves that to the owner's settings. A repository that exists stays as it is.

    Returns:
        Address of the repository.

    Raises:
        ConfigError: the hub refuses it, or cannot be reached.
    """
    hub = _hub()
    try:
        api = hub.HfApi()
        address = str(api.create_repo(name, repo_type=kind, private=is_private, exist_ok=True))
        api.upload_folder(repo_id=name, repo_type=kind, folder_path=folder, commit_message=message)
    except Exception as error:
        raise ConfigError(f"--push {name} {_why(error, what=kind, is_upload=True)}; {folder} is complete") from error
    return address


def _hub() -> Any:
    return import_optional("huggingface_hub", extra="share")


def _hub_errors() -> Any:
    return import_optional("huggingface_hub.errors", extra="share")  # a lazy submodule, so it must be imported


def _why(error: Exception, *, what: str, instead: str | None = None, is_upload: bool = False) -> str:
    """Why the transfer of `what` failed, and what to do. `instead`: the option that may name a local folder."""
    errors = _hub_errors()
    status = getattr(getattr(error, "response", None), "status_code", None)
    local = "is not a folder here, and " if instead else ""
    if isinstance(error, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError, so check it first
        return "is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
    if is_upload and status in (401, 403):
        return f"was refused ({status}): the token in HF_TOKEN or of `hf auth login` must have write access to it"
    if isinstance(error, errors.RevisionNotFoundError):
        return "has no such revision on the Hugging Face hub"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return f"{local}was not found on the Hugging Face hub (a private one needs HF_TOKEN)"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        cached = "" if is_upload else f"{local}is not in the hub's cache, and "
        once = f"; go online once, or give a folder with {what} as --{instead}" if instead else ""
        return f"{cached}the Hugging Face hub cannot be reached (no network, or HF_HUB_OFFLINE is set){once}"
    if isinstance(error, errors.EntryNotFoundError):
        return f"has no {what} on the Hugging Face hub"
    verb = "uploaded to" if is_upload else "fetched from"
    return f"cannot be {verb} the Hugging Face hub ({first_line(error)}); try again"
