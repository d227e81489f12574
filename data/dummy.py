# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Random samples of any shape, for benchmarks without real pixels or latents.

Standard normal by default. Zeros are optional, but GPUs draw less power and run faster on zeros than on real data, so
such a benchmark is too optimistic. Sample and label are pure functions of the index. dummy replaces any dataset of a
config, including latents: it ignores `dataset.root_dir`, `dataset.hub_name` and, unless it encodes online,
`[autoencoder]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from torchditan.config import options
from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets.options import Split, height_and_width
from torchditan.models.spec import TensorSpec
from torchditan.randomness import generator
from torchditan.sampling.drawing import SampleRows


class Dummy(ImageDataset):
    name = "dummy"
    horizontal_flip = False
    condition: Mapping[str, TensorSpec] | None = None
    """Conditions of the model in addition to labels; see `condition_on`."""

    def __init__(
        self,
        *,
        sample_shape: tuple[int, ...],
        num_samples: int,
        num_classes: int,
        fill: Literal["normal", "zeros"],
        split: Split,
    ) -> None:
        self.sample_shape = sample_shape
        self.num_samples = num_samples
        self.class_names = [f"class {label}" for label in range(num_classes)]
        self.fill = fill
        self.purpose = f"dummy {split}"

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = generator(0, self.purpose, index)
        label = int(draws.integers(len(self.class_names))) if self.class_names else None
        if self.fill == "zeros":
            sample = torch.zeros(self.sample_shape)
        else:
            sample = torch.from_numpy(draws.standard_normal(self.sample_shape, dtype=np.float32))
        item: dict[str, Any] = {"sample": sample} if label is None else {"sample": sample, "class_label": label}
        for name, (shape, dtype) in (self.condition or {}).items():
            if dtype.is_floating_point:
                item[name] = torch.from_numpy(draws.standard_normal(shape, dtype=np.float32)).to(dtype)
            else:
                item[name] = torch.ones(shape, dtype=dtype)  # a mask without padding
        return item

    def condition_on(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Add random tensors of these names and shapes to every item. Grids show those of the first two items."""
        self.condition = tensors
        items = [self[index] for index in range(min(2, len(self)))]
        self.prompts = SampleRows(
            names=[f"random {number}" for number in range(len(items))],
            numbers=list(range(len(items))),
            tensors={name: torch.stack([item[name] for item in items]) for name in tensors},
            negative={name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()},
        )


def build(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> Dummy:
    frames = () if config.num_frames is None else (config.num_frames,)
    return Dummy(
        sample_shape=(input_channels or 4, *frames, *height_and_width(config, default=(32, 32))),
        num_samples=config.dummy_size,
        num_classes=1000 if config.num_classes is None else config.num_classes,
        fill=config.dummy_fill,
        split=split,
    )
