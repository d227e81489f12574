# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""1,797 real handwritten digits of 8 x 8 grey pixels, embedded in scikit-learn (UCI, Alpaydin and Kaynak 1998).

Every sixth image is held out (299 for validation, 1,498 for training). Digits are not mirrored.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchditan.config import options
from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets.options import Split, refuse


def read_rows() -> np.ndarray:
    """The file in scikit-learn, (1797, 65) int64. Importing scikit-learn itself would take 2 s per process."""
    found = importlib.util.find_spec("sklearn")
    assert found is not None and found.origin is not None, "scikit-learn is a dependency of this package"
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.int64)


class Digits(ImageDataset):
    name = "digits"
    sample_shape = (1, 8, 8)
    horizontal_flip = False
    class_labels: np.ndarray

    def __init__(self, *, split: Split) -> None:
        rows = read_rows()  # (1797, 65): 64 pixels of 0..16, and the digit
        held_out = np.arange(len(rows)) % 6 == 5
        rows = rows[held_out if split == "validation" else ~held_out]
        samples = rows[:, :64].reshape(-1, 1, 8, 8).astype(np.float32) / 8 - 1
        self.samples = torch.from_numpy(samples)  # (N, 1, 8, 8)
        self.class_labels = rows[:, 64]
        self.class_names = [str(digit) for digit in range(10)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample": self.samples[index].clone(), "class_label": int(self.class_labels[index])}


def build(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> Digits:
    refuse(config, "root_dir", "hub_name", "crop")
    return Digits(split=split)
