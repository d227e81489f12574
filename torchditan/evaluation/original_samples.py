# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The samples that a trained model drew before the first step of a run, for PSNR and SSIM of later ones.

Only runs on captions need it.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchditan.config.options import Config
from torchditan.evaluation.reconstruction import to_8_bit
from torchditan.evaluation.sample_rows import SampleRows
from torchditan.run.atomic_files import atomic_writer

ORIGINAL = "original.npz"
"""In samples/: the samples of the original model before the first step, and how they were drawn."""


class PromptGrids(Protocol):
    """The part of `sample_grids.Grids` that is read here."""

    config: Config
    rows: SampleRows

    @property
    def has_original(self) -> bool: ...

    @property
    def drawn(self) -> str: ...


def why_no_scores(grids: PromptGrids, folder: Path, *, is_resumed: bool) -> str | None:
    """Why the user's own prompts have no PSNR and SSIM, and how to get them; None if they have.

    Args:
        grids: of prompts.
        folder: that of the grids.
        is_resumed: whether the run was resumed; its original samples must then exist.
    """
    config = grids.config
    if not grids.has_original:
        if not config.sampling.prompts:
            return None
        missing = "PSNR and SSIM are not measured: sampling.prompts have no real images"
        if config.model.path is None and config.checkpoint.initial_load_path is None:
            return f"{missing}, and this run starts from random weights"
        return f"{missing}; --sampling.at_start compares with the samples of the original model"
    if not is_resumed or grids.rows.references is not None:
        return None
    if read_original(folder / ORIGINAL, drawn=grids.drawn) is not None:
        return None
    why = f"{folder / ORIGINAL} is missing, or was drawn with other [sampling] options"
    return f"no PSNR and SSIM to the original: {why}"


def write_original(path: Path, pixels: Tensor, *, drawn: str) -> None:
    """Write pixels (rows, k, C, H, W) in [-1, 1], and all settings that determine them."""
    with atomic_writer(path) as file:
        np.savez(file, pixels=to_8_bit(pixels).byte().numpy(), drawn=np.array(drawn))


def read_original(path: Path, *, drawn: str) -> Tensor | None:
    """Pixels (rows, k, C, H, W), or None if they were not drawn, or drawn in another way than these samples."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if str(stored["drawn"]) != drawn:
                return None
            return torch.from_numpy(stored["pixels"]).float() / 127.5 - 1
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
