# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A checkpoint that misses a file or a part of one is never used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from refusals import assert_refused, refused

from torchditan.checkpoint.files import MANIFEST, list_checkpoints
from torchditan.checkpoint.loading import INDEX, DamagedCheckpointError, find_checkpoint, read_state, verify
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunScript

SMALL = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.global_batch_size=4"]
SMALL += ["--metrics.enable_sampling=false", "--metrics.log_freq=1", "--metrics.experiment_name=run"]
SMALL += ["--checkpoint.enable_checkpoint", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"]
TENSORS = "__0_0.distcp"


@pytest.fixture(scope="module")
def trained(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run after 2, 4, 6 and 8 steps."""
    folder = tmp_path_factory.mktemp("trained")
    run_alone("train.py", *SMALL, "--training.steps=8", f"--job.dump_folder={folder}")
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it to damage, where `python train.py` finds it."""
    return Path(shutil.copytree(trained, tmp_path / "outputs" / "run"))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("name", [INDEX, TENSORS, "config.json", "progress.json", MANIFEST])
def test_a_missing_a_cut_and_an_unknown_file_are_named(name: str, run: Path) -> None:
    cut(run / "checkpoint/step-00000004" / name)
    (run / "checkpoint/step-00000006" / name).rename(run / "checkpoint/step-00000006" / f"{name}.old")
    shutil.move(run / "checkpoint/step-00000008" / name, run / name)
    (run / "checkpoint/step-00000008" / name).symlink_to(run / name)
    verify(run / "checkpoint/step-00000002")
    for step in (4, 6, *([] if name == MANIFEST else [8])):
        with pytest.raises(DamagedCheckpointError, match=name):
            verify(run / f"checkpoint/step-0000000{step}")


def test_a_folder_with_the_name_of_another_step_is_refused(run: Path) -> None:
    renamed = (run / "checkpoint/step-00000006").rename(run / "checkpoint/step-00000009")
    with pytest.raises(DamagedCheckpointError, match="belongs to step 6"):
        verify(renamed)


def damage_the_newest(run: Path) -> None:
    """Cut the tensors of step 8, and empty the index of step 6."""
    cut(run / "checkpoint/step-00000008" / TENSORS)
    (run / "checkpoint/step-00000006" / INDEX).write_bytes(b"")


def test_a_run_continues_from_the_newest_complete_checkpoint_and_names_the_others(
    run: Path, run_script: RunScript
) -> None:
    before = read_state(run / "checkpoint/step-00000008")
    damage_the_newest(run)
    for left in ("step-00000010.partial", "step-00000002.deleted"):
        shutil.copytree(run / "checkpoint/step-00000004", run / "checkpoint" / left)
    code, out, err = run_script("train.py", *SMALL, "--training.steps=8")
    assert code == 0, err
    for line, step, name in zip(err.splitlines(), (8, 6), (TENSORS, INDEX), strict=True):
        assert_refused(line, f"warning: outputs/run/checkpoint/step-0000000{step}", [name, "bytes", "step-00000004"])
    assert "resumed at step 4" in out
    assert [record["step"] for record in read_metrics(run)] == list(range(1, 9))
    assert [path.name for path in sorted((run / "checkpoint").iterdir())] == [f"step-0000000{n}" for n in (2, 4, 6, 8)]
    again = read_state(run / "checkpoint/step-00000008")
    assert all(torch.equal(before[name], again[name]) for name in before)


def test_scripts_use_the_newest_complete_checkpoint_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_the_newest(run)
    assert find_checkpoint(run / "checkpoint", None) == run / "checkpoint/step-00000004"
    assert_refused(capsys.readouterr().err.splitlines()[0], "", ["step-00000008", TENSORS, "bytes", "step-00000004"])
    with refused("", "step-00000006", INDEX, "[2, 4, 6, 8]"):
        find_checkpoint(run / "checkpoint", 6)


def test_a_run_without_a_complete_checkpoint_does_not_start_over(run: Path, run_script: RunScript) -> None:
    for checkpoint in list_checkpoints(run / "checkpoint"):
        (checkpoint / MANIFEST).unlink()
    before = (run / "metrics.jsonl").read_bytes()
    code, _, err = run_script("train.py", *SMALL, "--training.steps=10")
    assert code == 2
    assert_refused(err, "", [*(f"step-0000000{step}" for step in (8, 6, 4, 2)), MANIFEST, "--metrics.experiment_name"])
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(run: Path, run_script: RunScript) -> None:
    flags = ["--training.seed=1", "--training.steps=2", "--metrics.experiment_name=other"]
    assert run_script("train.py", *SMALL, *flags).code == 0
    shutil.rmtree(run / "checkpoint")
    shutil.copytree(run.parent / "other/checkpoint", run / "checkpoint")
    code, _, err = run_script("train.py", *SMALL, "--training.steps=8")
    assert code == 2
    assert_refused(err, "", ["outputs/run/checkpoint/step-00000002", "training.seed is 1 there and 0 here"])
