# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Frozen networks: what a job computes with and never trains, such as the encoder of an alignment loss.

Notable:
- a job opens them before it builds the model, and computes their results before the loss. The loss reads them from the
  batch, so it is traced, compiled and counted without the network;
- they are in no checkpoint, no optimizer and no export. A run records their identity in config.json and refuses others:
  of targets under `weights of NETWORK` in its trajectory, of an autoencoder in `autoencoder.fingerprint`, of text
  encoders inside `dataset.fingerprint`;
- `hash_of_weights` makes it from open weights (targets, autoencoders of diffusers, RAE). TorchScript (Cosmos) and text
  encoders, which may be too large to open for it, are known by their files (cosmos.py, tensor_cache.py);
- on the meta device a network opens without weights, for its sizes: bytes in a plan, FLOPs, the shape of its result.
  Text encoders are freed before training and in no plan.
"""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchditan.models.spec import TensorSpec

LookUp = Callable[[Tensor], Tensor]
"""Samples of the dataset (B, C, H, W) on the CPU -> results (B, ...), read from a cache."""


@dataclass(frozen=True)
class FrozenNetwork:
    """An open network: images (B, 1 or 3, H, W) in [-1, 1] -> (B, ...) float32, without gradients."""

    module: nn.Module
    compute: Callable[[Tensor], Tensor]
    identity: str = ""
    """Hash of the weights, and of other settings of the result; "" on the meta device."""

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        return self.compute(images)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def flops(self, images: Tensor) -> int:
        """Of the forward pass of these images: a multiply-add is 2."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self(images)
        return int(counter.get_total_flops())


class Target(abc.ABC):
    """A tensor of each sample that a frozen network computes from its image. The loss reads it as `batch[name]`."""

    network: str
    """As the user named it: a folder, a hub name."""
    is_cached: bool = False
    """Whether it is computed for all images before training, and the network is freed."""

    @abc.abstractmethod
    def open(self, device: torch.device, dtype: torch.dtype) -> FrozenNetwork:
        """Open the network, on the meta device without weights.

        Raises:
            ConfigError: it does not exist, or is of another kind.
        """

    def fill_cache(
        self,
        dataset: Any,
        *,
        network: FrozenNetwork,
        flips: bool,
        folder: Path,
        rank: Any,
        timeout_seconds: float,
    ) -> LookUp:
        """For `is_cached`: compute what the cache lacks, on all ranks, and return what reads it.

        Args:
            dataset: training images, an `ImageDataset`.
            network: the open network.
            flips: also compute the results of mirrored images.
            folder: of the cache.
            rank: this process, a `Rank`.
            timeout_seconds: longest wait for another rank.
        """
        raise NotImplementedError

    @functools.cached_property
    def on_meta(self) -> FrozenNetwork:
        return self.open(torch.device("meta"), torch.bfloat16)

    @functools.cached_property
    def tensor(self) -> TensorSpec:
        """Of one sample in the batch."""
        dtype = torch.float16 if self.is_cached else torch.float32
        return TensorSpec(tuple(self.on_meta(self.example(1)).shape[1:]), dtype)

    @property
    def num_parameters(self) -> int:
        return self.on_meta.num_parameters

    @functools.cached_property
    def flops(self) -> int:
        """Of the forward pass of one image."""
        return self.on_meta.flops(self.example(1))

    @staticmethod
    def example(batch_size: int) -> Tensor:
        """Images on the meta device. A network resizes them, so one size does for all."""
        return torch.empty(batch_size, 3, 32, 32, device="meta")


def hash_of_weights(weights: Mapping[str, Tensor], *settings: object) -> str:
    """Equal for equal names, shapes, dtypes and bytes, independent of the file: 16 hexadecimal digits."""
    digest = hashlib.sha256(" ".join(map(str, settings)).encode())
    for name, tensor in weights.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
