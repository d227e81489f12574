# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What a run shows before its first step, and `--preview`, which shows only that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_runs
from PIL import Image
from refusals import assert_refused

if TYPE_CHECKING:
    from tests.conftest import RunScript


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes in `Train/` and `Test/`, and files of other kinds."""
    for number in range(30):
        for name in ("Train/cat", "Train/dog", *(["Test/cat"] if number < 3 else [])):
            path = tmp_path / "photos" / name / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 6), (number, 0, 0)).save(path)
    for name in ("a.xyz", "b.xyz", "notes.txt"):
        (tmp_path / "photos/Train" / name).write_text("")
    return tmp_path / "photos"


def flags(photos: Path, *more: str) -> list[str]:
    data = ["--dataset.dataset_name=folder", f"--dataset.root_dir={photos}", "--dataset.image_size=8"]
    return tiny_runs.job(photos.parent / "run", *data, *more)


def test_what_will_be_trained_is_shown_in_one_block_and_when_it_will_end(photos: Path, run_script: RunScript) -> None:
    outcome = run_script("train.py", *flags(photos, "--training.steps=12"))
    assert outcome.code == 0, outcome.err
    block, _, rest = outcome.out.partition("step  1/12")
    shown = ["on folder: 59 images of 3x8x8", "2 classes: cat, dog", "held out: 1 image,", "3 images, Test/cat/00.png"]
    for known in (*shown, "not read: 1 .txt, 2 .xyz"):
        assert known in block, known
    assert rest.count("the run will end at about ") == 1


def test_a_preview_shows_samples_and_trains_nothing(photos: Path, run_script: RunScript) -> None:
    outcome = run_script("torchditan", "train", *flags(photos, "--preview"))
    assert outcome.code == 0, outcome.err
    assert "2 classes: cat, dog" in outcome.out and "memory by the plan: " in outcome.out
    run = photos.parent / "run"
    assert [path.name for path in run.iterdir()] == ["preview.png"]
    with Image.open(run / "preview.png") as picture:
        assert picture.height > 16 * 128
    assert run_script("train.py", *flags(photos, "--training.steps=1")).code == 0  # the folder is free for the run


def test_captions_are_shown_and_previewed_without_a_text_encoder(
    photos: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_text_encoder(*arguments: object, **options: object) -> None:
        raise AssertionError("a preview encodes nothing")

    monkeypatch.setattr("torchditan.extras.captions.dataset.find_text_encoder", find_text_encoder)
    (photos / "Train/cat/00.txt").write_text("a cat")
    (photos / "Train/notes.txt").unlink()
    data = ["--dataset.dataset_name=captions", "--dataset.upscale", "--dataset.trigger_word=sks"]
    outcome = run_script("torchditan", "train", *flags(photos, *data, "--model.text=cross_attention", "--preview"))
    assert outcome.code == 0, outcome.err
    for known in (
        "captions: 1 of 60 images",
        "59 have only the trigger word sks",
        "held out: 1 image, ",
        "Test/cat/00.png",
    ):
        assert known in outcome.out, known


@pytest.mark.parametrize("dataset", ["folder", "captions"])
def test_a_picture_that_moved_to_the_held_out_ones_is_named_when_the_run_is_continued(
    dataset: str, photos: Path, run_script: RunScript
) -> None:
    (photos / "Test").rename(photos / "Val")
    (photos / "Train/notes.txt").unlink()
    text = [
        "--model.text=cross_attention",
        "--dataset.upscale",
        "--dataset.trigger_word=sks",
        "--text_encoder.max_length=8",
    ]
    more = [f"--dataset.dataset_name={dataset}", *tiny_runs.KEEP, *(text if dataset == "captions" else [])]
    assert run_script("train.py", *flags(photos, *more, "--training.steps=1")).code == 0
    (photos / "Train/cat/07.png").rename(photos / "Val/cat/07.png")
    outcome = run_script("train.py", *flags(photos, *more, "--training.steps=2"))
    assert outcome.code == 2
    assert_refused(outcome.err, "", ["Train/cat/07.png"])
