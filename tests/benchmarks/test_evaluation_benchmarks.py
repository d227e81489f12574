# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""benchmarks/evaluation_time.py and the damage of benchmarks/feature_distances.py at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a folder of scripts, not a package

import feature_distances

pytestmark = pytest.mark.nightly

SCRIPT = Path(feature_distances.__file__).parent / "evaluation_time.py"


def test_times_of_all_figures_are_printed_and_kept(tmp_path: Path) -> None:
    flags = ["--num_images=40", "--num_features=8", "--threads=1", "--only=neighbours", f"--out={tmp_path / 'a.json'}"]
    command = [sys.executable, str(SCRIPT), *flags]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout
    kept = json.loads((tmp_path / "a.json").read_text())
    names = {"radii of real images", "radii of generated images, comparison", "precision to coverage"}
    assert set(kept["seconds"]) == set(kept["CPU seconds"]) == names
    assert kept["peak_memory_gib"] > 0
    assert all(name in output for name in names)


def test_damage_grows_with_its_level_and_leaves_flat_images_flat() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    contrast = [images.float().std().item()]
    contrast += [feature_distances.blurred(images, sigma).float().std().item() for sigma in feature_distances.BLUR]
    assert contrast == sorted(contrast, reverse=True)
    flat = torch.full((1, 3, 32, 32), 100, dtype=torch.uint8)
    assert torch.equal(feature_distances.blurred(flat, 2.0), flat)
    stds = [feature_distances.noisy(flat, std, seed=0).float().std().item() for std in feature_distances.NOISE]
    for found, std in zip(stds, feature_distances.NOISE, strict=True):
        assert abs(found / std - 1) < 0.1
