# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A folder that is complete or does not exist: an imported run, or an export to diffusers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchditan.config.errors import ConfigError
from torchditan.run.atomic_files import sync_folder, temporary_path


@contextmanager
def new_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end. An error leaves nothing behind.

    Args:
        folder: the folder to create.
        replace: delete an existing one just before.

    Raises:
        ConfigError: it exists, without `replace`, or cannot be written.
    """
    if folder.exists() and not replace:
        raise ConfigError(f"{folder} exists; choose another name")
    partial = temporary_path(folder)
    try:
        partial.mkdir(parents=True)
        yield partial
        if replace and folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
