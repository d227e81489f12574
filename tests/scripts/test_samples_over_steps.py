# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan timeline` cuts the same samples out of every grid of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from refusals import refused

from torchditan.evaluation.grid_picture import LAYOUT_KEY, read_cells, save_grid

if TYPE_CHECKING:
    from tests.conftest import RunScript

SCRIPT = ("torchditan", "timeline")
STEPS = (10, 20, 30)


def color(step: int, row: int, column: int) -> tuple[int, int, int]:
    return (step * 8, 40 + 60 * row, 40 + 60 * column)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a grid of three classes and two samples at each step, each sample of its own colour."""
    (tmp_path / "run" / "samples").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text('{"config": {}}')
    for step in STEPS:
        colors = torch.tensor([[color(step, row, column) for column in range(2)] for row in range(3)])
        samples = (colors / 127.5 - 1)[..., None, None].expand(3, 2, 3, 8, 8)
        path = tmp_path / "run" / "samples" / f"step_{step:08d}.png"
        save_grid(path, samples, torch.zeros(3, 1, 3, 8, 8), ["zero", "one", "two"], title=f"run, step {step}")
    return tmp_path / "run"


def contains(picture: Image.Image, wanted: tuple[int, int, int]) -> bool:
    return bool((np.asarray(picture.convert("RGB")).astype(int) == wanted).all(axis=-1).sum() == 64 * 64)


def test_a_grid_gives_back_the_cells_that_were_drawn(run: Path) -> None:
    found = read_cells(run / "samples" / "step_00000020.png")
    assert found is not None
    cells, labels = found
    assert labels == ["zero", "one", "two"]
    assert cells.shape == (3, 2, 64, 64, 3)
    for row in range(3):
        for column in range(2):
            assert (cells[row, column] == torch.tensor(color(20, row, column))).all()


def test_the_strip_has_the_first_sample_of_each_chosen_class_at_every_step(run: Path, run_script: RunScript) -> None:
    code, output, errors = run_script(*SCRIPT, str(run), "--classes", "0,2")
    assert (code, errors) == (0, "")
    assert output.splitlines()[0] == f"strip of 3 steps: {run / 'samples' / 'steps.png'}"
    strip = Image.open(run / "samples" / "steps.png")
    for step in STEPS:
        assert contains(strip, color(step, 0, 0))
        assert contains(strip, color(step, 2, 0))
        assert not contains(strip, color(step, 1, 0))
        assert not contains(strip, color(step, 0, 1))


def test_the_animation_has_a_frame_for_each_step(run: Path, run_script: RunScript, tmp_path: Path) -> None:
    code, _, errors = run_script(*SCRIPT, str(run), "--frame_ms", "100", "--out", str(tmp_path / "pictures"))
    assert (code, errors) == (0, "")
    animation = Image.open(tmp_path / "pictures" / "steps.gif")
    assert animation.n_frames == 3
    for frame, step in enumerate(STEPS):
        animation.seek(frame)
        near = np.abs(np.asarray(animation.convert("RGB")).astype(int) - color(step, 2, 1)).max(axis=-1) < 8
        assert near.sum() >= 64 * 64, step  # a GIF has 256 colours
    assert animation.info["duration"] == 400


def test_columns_chooses_steps_evenly_with_first_and_last(run: Path, run_script: RunScript) -> None:
    assert run_script(*SCRIPT, str(run), "--columns", "2")[0] == 0
    strip = Image.open(run / "samples" / "steps.png")
    assert [contains(strip, color(step, 0, 0)) for step in STEPS] == [True, False, True]


def test_grids_of_other_rows_are_left_out(run: Path, run_script: RunScript) -> None:
    path = run / "samples" / "step_00000005.png"
    save_grid(path, torch.zeros(1, 2, 3, 8, 8), None, ["zero"], title="another grid")
    assert run_script(*SCRIPT, str(run))[1].startswith("strip of 3 steps")


@pytest.mark.parametrize(
    ("flags", "mistake"),
    [(["--classes", "0,3"], "0 to 2"), (["--classes", "a"], "0 to 2"), (["--columns", "0"], "at least 1")],
)
def test_a_wrong_choice_is_refused(run: Path, run_script: RunScript, flags: list[str], mistake: str) -> None:
    code, _, errors = run_script(*SCRIPT, str(run), *flags)
    assert code == 2
    assert flags[0].lstrip("-") in errors
    assert mistake in errors


def test_a_run_without_usable_grids_is_refused(run: Path, run_script: RunScript) -> None:
    for path in (run / "samples").iterdir():
        with Image.open(path) as picture:
            picture.load()
        picture.info.clear()
        picture.save(path)  # as an older version drew it
    code, _, errors = run_script(*SCRIPT, str(run))
    assert (code, "did not store their layout" in errors) == (2, True)
    for path in (run / "samples").iterdir():
        path.unlink()
    code, _, errors = run_script(*SCRIPT, str(run))
    assert (code, "metrics.sample_freq" in errors) == (2, True)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"<html>", lambda data: b""])
def test_a_damaged_grid_is_named(run: Path, run_script: RunScript, damage: Callable[[bytes], bytes]) -> None:
    path = min((run / "samples").glob("step_*.png"))
    path.write_bytes(damage(path.read_bytes()))
    code, _, errors = run_script(*SCRIPT, str(run))
    assert code == 2 and errors.startswith(f"error: {path} is not a readable grid") and errors.count("\n") == 1
    assert not (run / "samples" / "steps.png").exists()


@pytest.mark.parametrize(
    "layout",
    [
        {"num_columns": "2"},
        {"num_columns": 2**31 - 1},
        {"num_columns": 0},
        {"top": -1},
        {"left": 10**30},
        {"width": 0},
        {"column_pitch": 0},
        {"labels": []},
        {"labels": [1, 2, 3]},
        {"labels": "three"},
        {"labels": ["again"] * 1_000_000},
        {"row_pitch": 1.5},
    ],
    ids=lambda layout: next(iter(layout)),
)
def test_a_grid_with_a_layout_of_a_stranger_is_named(run: Path, layout: dict[str, Any]) -> None:
    path = min((run / "samples").glob("step_*.png"))
    with Image.open(path) as picture:
        about = PngInfo()
        about.add_text(LAYOUT_KEY, json.dumps(json.loads(picture.info[LAYOUT_KEY]) | layout))
        picture.save(path, pnginfo=about)
    with refused(str(path), "not", "layout" if "labels" not in layout else "its"):
        read_cells(path)


def test_other_pictures_in_the_folder_are_no_grids(run: Path, run_script: RunScript) -> None:
    (run / "samples/step_last.png").write_bytes(b"a user's own")
    assert run_script(*SCRIPT, str(run))[1].startswith("strip of 3 steps")
