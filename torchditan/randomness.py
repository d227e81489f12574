# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Randomness as a pure function of (seed, purpose, index), independent of rank, world size and history.

Notable:
- counter-based Philox4x64 (Salmon et al. 2011): the purpose selects the key and the index the counter. The stream of
  any sample can start without drawing those before it. A single uniform number is a hash of key and index;
- the loader's workers draw the noise, timestep and label dropout of a training sample on the CPU while they decode it.
  A batch therefore contains the same tensors for any split over ranks.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

Kind = Literal["uniform", "normal"]
"""uniform: (B,) float32 in [0, 1). normal: (B, *sample_shape) float32, standard normal."""

NOISE_TIMESTEP_DROPOUT: Mapping[str, Kind] = {"noise": "normal", "timestep": "uniform", "label_dropout": "uniform"}
"""The numbers that every objective of this package reads."""


class Randomness(dict[str, torch.Tensor]):
    """The random numbers of a batch by name, one row per sample, as an objective or a sample space declares them."""

    @property
    def noise(self) -> torch.Tensor:
        """(B, *sample_shape) float32, standard normal."""
        return self["noise"]

    @property
    def timestep(self) -> torch.Tensor:
        """(B,) float32, uniform in [0, 1). The objective transforms it to its own distribution."""
        return self["timestep"]

    @property
    def label_dropout(self) -> torch.Tensor:
        """(B,) float32, uniform in [0, 1). The label is dropped if it is below the dropout rate."""
        return self["label_dropout"]

    def to(self, device: torch.device) -> Randomness:
        return self._map(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))

    def pin_memory(self) -> Randomness:
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Randomness:
        return Randomness({name: function(value) for name, value in self.items()})


@functools.lru_cache(maxsize=256)
def stream_key(seed: int, purpose: str) -> tuple[int, int]:
    """The key of a stream: two unsigned numbers of 64 bits."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def generator(seed: int, purpose: str, index: int) -> np.random.Generator:
    """Generator of one sample's random numbers for one purpose.

    Args:
        seed: the run's seed.
        purpose: use of the numbers, for example "noise"; each purpose has a separate stream.
        index: position of the sample in the training stream, or any other 64-bit number.
    """
    key = np.array(stream_key(seed, purpose), dtype=np.uint64)
    counter = np.array([0, 0, index, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class IndexedGenerator:
    """`generator` for many indices of one purpose. It reuses one object, which is seven times as fast.

    The generator that `at` returns is valid until the next call of `at`.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        self._generator = generator(seed, purpose, 0)
        self._state: Any = self._generator.bit_generator.state
        self._counter = self._state["state"]["counter"]  # (4,), the index third

    def at(self, index: int) -> np.random.Generator:
        self._counter[2] = index
        self._generator.bit_generator.state = self._state
        return self._generator


class Permutation:
    """A shuffle of range(length) in constant memory, which computes positions instead of storing them.

    A Feistel network (Luby and Rackoff 1988) on pairs (left, right) of about sqrt(length) each, added modulo their own
    ranges. The network is applied again to the few values outside the range (both after Black and Rogaway 2002).

    Args:
        seed, purpose, index: as in `generator`; each index gives another shuffle.
        length: size of the range, at least 1.
    """

    _NUM_ROUNDS = 10

    def __init__(self, seed: int, purpose: str, index: int, *, length: int) -> None:
        assert length >= 1, length
        self.length = length
        num_left = math.isqrt(length - 1) + 1
        self._ranges = np.uint64(num_left), np.uint64(-(-length // num_left))
        draws = generator(seed, purpose, index)
        self._keys = draws.integers(0, 2**64, size=self._NUM_ROUNDS, dtype=np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """(n,) positions in [0, length) -> (n,) int64. Distinct positions give distinct numbers in [0, length)."""
        values = self._network(positions.astype(np.uint64))
        while True:
            outside = values >= self.length
            if not outside.any():
                return values.astype(np.int64)
            values[outside] = self._network(values[outside])

    def _network(self, values: np.ndarray) -> np.ndarray:
        num_left, num_right = self._ranges
        left, right = values // num_right, values % num_right
        for left_key, right_key in self._keys.reshape(-1, 2):
            left = (left + _mix(right ^ left_key) % num_left) % num_left
            right = (right + _mix(left ^ right_key) % num_right) % num_right
        return left * num_right + right


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele et al. 2014): every bit depends on every bit. uint64 wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def name_to_index(name: str) -> int:
    """64-bit index of a name, for random numbers that belong to a name (a parameter)."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def normal(seed: int, purpose: str, index: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Standard normal noise, (len(index), *shape) float32, one stream per index."""
    noise = np.empty((len(index), *shape), dtype=np.float32)
    draws = IndexedGenerator(seed, purpose)
    for row, i in zip(noise, index, strict=True):
        draws.at(i).standard_normal(dtype=np.float32, out=row)
    return torch.from_numpy(noise)


def uniform(seed: int, purpose: str, index: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Uniform numbers in [0, 1), (len(index),) float32: multiples of 2^-24.

    A single number per index needs no stream: it is a hash of key and index, splitmix64 with a second round.
    """
    key = np.array(stream_key(seed, purpose), dtype=np.uint64)
    counter = np.asarray(index, dtype=np.uint64) * _GOLDEN + key[0]  # (n,)
    bits = _mix(_mix(counter) ^ key[1])
    return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))


def draw(
    seed: int, index: Sequence[int], shape: Sequence[int], numbers: Mapping[str, Kind] = NOISE_TIMESTEP_DROPOUT
) -> Randomness:
    """Randomness of the training samples at these positions of the stream.

    Args:
        seed: the run's seed.
        index: B global positions.
        shape: shape of one sample as the model sees it, (C, H, W).
        numbers: what to draw, by name. Each name has its own stream.
    """
    return Randomness(
        {
            name: normal(seed, name, index, shape) if kind == "normal" else uniform(seed, name, index)
            for name, kind in numbers.items()
        }
    )
