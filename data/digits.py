# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""1,797 real handwritten digits of 8 x 8 grey pixels, embedded in scikit-learn (UCI, Alpaydin and Kaynak 1998).

Every sixth image is held out (299 for validation, 1,498 for training). Digits are not mirrored.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from data.options import refuse, refuse_crop
from torchditan.config import options
from torchditan.data_stream.datasets import ImageDataset


class Digits(ImageDataset):
    name = "digits"
    sample_shape = (1, 8, 8)
    horizontal_flip = False
    class_labels: np.ndarray

    def __init__(self, *, split: Literal["train", "validation"]) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        held_out = np.arange(len(digits.target)) % 6 == 5
        chosen = held_out if split == "validation" else ~held_out
        samples = digits.images[chosen].astype(np.float32) / 8 - 1  # stored as 0..16
        self.samples = torch.from_numpy(samples[:, None])  # (N, 1, 8, 8)
        self.class_labels = digits.target[chosen]
        self.class_names = [str(digit) for digit in range(10)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample": self.samples[index].clone(), "class_label": int(self.class_labels[index])}


def build(
    config: options.Dataset, *, split: Literal["train", "validation"], input_channels: int | None = None
) -> Digits:
    refuse(config, "root_dir", "hub_name")
    refuse_crop(config)
    return Digits(split=split)
