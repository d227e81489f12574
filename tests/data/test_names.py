# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files and folders whose names are not UTF-8, as archives of other systems leave them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from torchditan.config.options import Dataset
from torchditan.datasets import build_dataset
from torchditan.errors import as_unicode, printable
from torchditan.run.reading import read_config

if TYPE_CHECKING:
    from tests.conftest import RunScript

ROOT, CLASSES = os.fsdecode(b"Fotos \xfc"), [os.fsdecode(b"\x8e\xca\x90^"), os.fsdecode(b"\xc4pfel")]
SHOWN = [r"\x8e\xca\x90^", r"\xc4pfel"]
FOLDER = ["--dataset.dataset_name=folder", f"--dataset.root_dir={ROOT}", "--dataset.image_size=8"]
FOLDER += ["--dataset.corrupt_images=skip"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for folder in CLASSES:
            (tmp_path / ROOT / split / folder).mkdir(parents=True)
            for number in range(3):
                name = os.fsdecode(b"\xe4%d.png" % number)
                Image.new("RGB", (8, 8), (90 * number, 0, 0)).save(tmp_path / ROOT / split / folder / name)
    (tmp_path / ROOT / "train" / CLASSES[1] / os.fsdecode(b"\xe4x.png")).write_bytes(b"no image")
    return tmp_path


def test_they_train_draw_share_and_report(photos: Path, run_script: RunScript) -> None:
    flags = ["--model.flavor=debugmodel", "--training.batch_size=2", "--training.steps=1", "--sampling.num_steps=1"]
    flags += ["--dataset.num_workers=0", "--metrics.experiment_name=run", "--metrics.enable_tensorboard"]
    code, out, err = run_script("torchditan", "train", *FOLDER, *flags)
    assert (code, err) == (0, "")
    assert rf"Fotos \xfc/train/{SHOWN[1]}/\xe4x.png (unknown format)" in out
    stored = read_config(photos / "outputs/run")
    assert stored["class_names"] == SHOWN
    assert stored["config"]["dataset"]["root_dir"] == ROOT
    assert (photos / "outputs/run/samples/step_00000001.png").exists()
    for command in (["generate", "outputs/run"], ["report", "outputs/run"], ["share", "outputs/run", "shared"]):
        assert run_script("torchditan", *command).code == 0, command


def test_they_are_packed(photos: Path, run_script: RunScript) -> None:
    code, _, err = run_script("torchditan", "pack", "packed", *FOLDER)
    assert code == 0 and rf"{SHOWN[1]}/\xe4x.png" in err
    assert (photos / "packed/classes.txt").read_text(encoding="utf-8").splitlines() == SHOWN
    (photos / "packed/classes.txt").write_bytes(b"one\n\xc4pfel\n")
    packed = Dataset(dataset_name="webdataset", root_dir=str(photos / "packed"), image_size=[8, 8])
    assert build_dataset(packed, split="train").class_names == ["one", SHOWN[1]]


def test_names_become_text() -> None:
    assert as_unicode("Äpfel 漢字") == "Äpfel 漢字"
    assert [as_unicode(name) for name in CLASSES] == SHOWN
    assert as_unicode("\ud83d") == printable("\ud83d") == r"\ud83d"
    assert printable(f"{CLASSES[1]}: ä") == r"\xc4pfel: ä"
