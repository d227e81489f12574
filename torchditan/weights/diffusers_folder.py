# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the exports to diffusers have in common: an atomic folder, its file names, and the result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchditan.config.errors import ConfigError
from torchditan.run.atomic_files import sync_folder, temporary_path
from torchditan.weights.exported import StoredWeights

INDEX_FILE = "model_index.json"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class ExportedPipeline:
    """Result of an export to diffusers."""

    weights: StoredWeights
    how_to_open: str
    """A line of Python."""
    left_out: str | None
    """Reason why only the transformer was exported; None for a whole pipeline."""
    notes: tuple[str, ...] = ()
    """How the samples of the pipeline differ from those of the run."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end. After an error neither exists.

    Raises:
        ConfigError: it exists or cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another name")
    partial = temporary_path(folder)
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
