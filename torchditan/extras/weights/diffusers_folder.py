# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the exports to diffusers have in common: the names of files, and the result."""

from __future__ import annotations

from dataclasses import dataclass

from torchditan.checkpoint.weights import Weights

INDEX_FILE = "model_index.json"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class ExportedPipeline:
    """Result of an export to diffusers."""

    weights: Weights
    how_to_open: str
    """A line of Python."""
    left_out: str | None
    """Reason why only the transformer was exported; None for a whole pipeline."""
    notes: tuple[str, ...] = ()
    """How the samples of the pipeline differ from those of the run."""
