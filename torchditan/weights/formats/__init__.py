# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoints of other projects, converted to our names and conventions. One module per format (registry.FORMATS).

`foreign_files.py` reads the files. A converter gives the weights under our names, and the options with which our model
and samplers compute what the project's own code computes.

May import: config, models, registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Converted:
    """Weights of another project under our names, and the options with which our model computes the same."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]
    """`{"model.preset": "official", "model.flavor": "DiT-XL", "diffusion.objective": "ddpm", ...}`."""
    sample_shape: tuple[int, int, int]
    """(C, H, W) of the model's input, in pixels or latent cells."""
    num_classes: int
    """Number of classes without the null class."""
    notes: tuple[str, ...]
    """What was converted, one phrase each, printed after the import."""


@dataclass(frozen=True)
class Given:
    """What the user states because some files do not contain it."""

    num_heads: int | None = None
    """`--num_heads`."""
    sample_size: tuple[int, int] | None = None
    """`--sample_size`: height and width of the model's input, in pixels or latent cells."""
    noise_schedule: str | None = None
    """`--noise_schedule`: a value of `diffusion.noise_schedule`."""
    prediction: str | None = None
    """`--prediction`: a value of `diffusion.prediction`."""


class Convert(Protocol):
    """The function that a line of `registry.FORMATS` names."""

    def __call__(self, tensors: dict[str, Tensor], *, content: Mapping[str, Any], given: Given) -> Converted:
        """Convert the weights.

        Args:
            tensors: as stored, memory-mapped where possible, so keep those that do not change as they are.
            content: config.json of a folder, and the path as `folder`; {} for a file.
            given: what the user states.

        Raises:
            ConfigError: the weights do not fit this format. The message continues the path of the file: "has no ...".
        """
        ...
