# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Randomness as a pure function of (seed, purpose, index): never of rank, world size or history.

Notable:
- counter-based Philox4x64 (Salmon et al. 2011): the purpose picks the key, the index the counter, so any
  sample's stream starts anywhere without drawing the ones before it;
- the noise, timestep and label dropout of a training sample are drawn on the CPU beside its decoding, in
  the loader's workers, so a batch is the same tensors however it was split over ranks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class Randomness(NamedTuple):
    """What an objective may draw for a batch, one row per sample."""

    noise: torch.Tensor
    """(B, *sample_shape) float32, standard normal."""
    timestep: torch.Tensor
    """(B,) float32, uniform in [0, 1); the objective turns it into its own distribution."""
    label_dropout: torch.Tensor
    """(B,) float32, uniform in [0, 1); the label is dropped where it is below the dropout rate."""

    def to(self, device: torch.device) -> Randomness:
        return Randomness(*(tensor.to(device, non_blocking=True) for tensor in self))


@functools.lru_cache(maxsize=256)
def _key(seed: int, purpose: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def generator(seed: int, purpose: str, index: int) -> np.random.Generator:
    """Generator of one sample's draws for one purpose.

    Args:
        seed: the run's seed.
        purpose: what the numbers are for, "noise" say; each purpose has a stream of its own.
        index: position of the sample in the training stream, or any other 64-bit number.
    """
    key = np.array(_key(seed, purpose), dtype=np.uint64)
    counter = np.array([0, 0, index, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def name_to_index(name: str) -> int:
    """64-bit index of a name, to draw for something that has no number (a parameter)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def normal(seed: int, purpose: str, index: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Standard normal noise, (len(index), *shape) float32, one stream per index."""
    noise = np.empty((len(index), *shape), dtype=np.float32)
    for row, i in zip(noise, index, strict=True):
        generator(seed, purpose, i).standard_normal(dtype=np.float32, out=row)
    return torch.from_numpy(noise)


def uniform(seed: int, purpose: str, index: Sequence[int]) -> torch.Tensor:
    """Uniform numbers in [0, 1), (len(index),) float32, one stream per index."""
    return torch.tensor([generator(seed, purpose, i).random(dtype=np.float32) for i in index], dtype=torch.float32)


def draw(seed: int, index: Sequence[int], shape: Sequence[int]) -> Randomness:
    """Randomness of the training samples at these positions of the stream.

    Args:
        seed: the run's seed.
        index: B global positions.
        shape: shape of one sample, (C, H, W).
    """
    return Randomness(
        noise=normal(seed, "noise", index, shape),
        timestep=uniform(seed, "timestep", index),
        label_dropout=uniform(seed, "label_dropout", index),
    )
