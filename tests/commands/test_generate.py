# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan generate` on a trained run, from another folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

if TYPE_CHECKING:
    from tests.conftest import RunScript
    from tests.zoo import Zoo


@pytest.fixture
def run(zoo: Zoo, tmp_path: Path) -> Path:
    """A run of digits with checkpoints at steps 3 and 6, whose grids have 2 classes of 1 image."""
    return shutil.copytree(zoo("digits"), tmp_path / "a run")


def test_a_grid_of_the_newest_checkpoint_lies_in_the_run(run: Path, run_script: RunScript) -> None:
    code, output, errors = run_script("torchditan", "generate", run.name)
    assert (code, errors) == (0, "")
    timing, where = output.splitlines()
    assert timing.startswith("2 images in ")
    assert where == "samples, generated next to real: a run/samples/generated_00000006_seed0.png"
    with Image.open(run / "samples/generated_00000006_seed0.png") as two_classes:
        assert two_classes.size[1] > 2 * 48


def test_it_draws_what_it_was_asked_for(run: Path, run_script: RunScript) -> None:
    arguments = ["--step=3", "--weights=raw", "--classes=3,5", "--out=x/grid.png", "--batch_size=3", "--seed=4"]
    arguments += ["--sampling.images_per_class=2", "--sampling.sampler=heun"]
    code, output, errors = run_script("torchditan", "generate", run, *arguments)
    assert (code, errors) == (0, "")
    assert output.startswith("4 images in ")
    with Image.open("x/grid.png") as two_classes:
        assert two_classes.size[1] < 5 * 48


def test_it_keeps_the_pictures_that_it_drew_before(run: Path, run_script: RunScript) -> None:
    for guidance in (1, 2, 3):
        outcome = run_script("torchditan", "generate", run, "--seed=7", f"--sampling.guidance_scale={guidance}")
        assert outcome.code == 0, outcome.err
    pictures = {path.name: path.read_bytes() for path in (run / "samples").glob("*seed7*")}
    assert sorted(pictures) == [f"generated_00000006_seed7{end}.png" for end in ("", "_2", "_3")]
    assert len(set(pictures.values())) == 3
