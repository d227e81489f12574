# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""benchmarks/captioned_folder.py: its pictures, and what it counts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a folder of scripts, not a package

import captioned_folder


def test_noise_keeps_the_nearest_picture_and_another_colour_changes_it(tmp_path: Path) -> None:
    captions = captioned_folder.draw_pictures(tmp_path)
    assert len(set(captions)) == 20 and len(list(tmp_path.glob("*.txt"))) == 20
    files = sorted(tmp_path.glob("*.png"))
    pictures = np.stack([np.asarray(Image.open(file).resize((64, 64))) for file in files])
    noise = np.random.default_rng(0).normal(0, 15, pictures.shape)
    noisy = (pictures + noise).clip(0, 255).astype(np.uint8)
    assert captioned_folder.nearest(noisy, pictures).tolist() == list(range(20))
    swapped = pictures[:4, ..., ::-1]  # red is blue
    kinds = [captioned_folder.KINDS[place] for place in captioned_folder.nearest(swapped, pictures)]
    assert kinds.count("blue square") >= 3
