# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A checkpoint that misses a file or a part of one is never used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_runs
import zoo as zoo_of_runs
from refusals import assert_refused, refused

from torchditan.checkpoint.files import MANIFEST
from torchditan.checkpoint.loading import INDEX, DamagedCheckpointError, find_checkpoint, verify
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from zoo import Zoo

    from tests.conftest import Outcome, RunScript

TENSORS = "__0_0.distcp"


@pytest.fixture
def run(zoo: Zoo, tmp_path: Path) -> Path:
    """A copy, to damage, of a run with checkpoints of steps 3 and 6."""
    return Path(shutil.copytree(zoo("digits"), tmp_path / "run"))


def resume(run: Path, run_script: RunScript) -> Outcome:
    return run_script("train.py", *tiny_runs.job(run, *zoo_of_runs.KEPT, *zoo_of_runs.JOBS["digits"]))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("name", [INDEX, TENSORS, "config.json", "progress.json", MANIFEST])
def test_a_missing_a_cut_and_an_unknown_file_are_named(name: str, run: Path, tmp_path: Path) -> None:
    def copy(place: str) -> Path:
        return Path(shutil.copytree(run / "checkpoint/step-00000006", tmp_path / place / "step-00000006")) / name

    verify(run / "checkpoint/step-00000006")
    cut_file, renamed, linked = map(copy, ("cut", "renamed", "linked"))
    cut(cut_file)
    renamed.rename(renamed.with_name(f"{name}.old"))
    shutil.move(linked, tmp_path / name)
    linked.symlink_to(tmp_path / name)
    for damaged in (cut_file, renamed, *([] if name == MANIFEST else [linked])):
        with pytest.raises(DamagedCheckpointError, match=name):
            verify(damaged.parent)


def test_a_folder_with_the_name_of_another_step_is_refused(run: Path) -> None:
    renamed = (run / "checkpoint/step-00000006").rename(run / "checkpoint/step-00000009")
    with pytest.raises(DamagedCheckpointError, match="belongs to step 6"):
        verify(renamed)


def test_a_run_continues_from_the_newest_complete_checkpoint_and_names_the_others(
    run: Path, zoo: Zoo, run_script: RunScript
) -> None:
    shutil.copytree(run / "checkpoint/step-00000006", run / "checkpoint/step-00000005")
    (run / "checkpoint/step-00000006" / INDEX).write_bytes(b"")
    for left in ("step-00000010.partial", "step-00000002.deleted"):
        shutil.copytree(run / "checkpoint/step-00000003", run / "checkpoint" / left)
    code, out, err = resume(run, run_script)
    assert code == 0, err
    for line, step, name in zip(err.splitlines(), (6, 5), (INDEX, "belongs"), strict=True):
        assert_refused(line, f"warning: {run}/checkpoint/step-0000000{step}", [name, "step-00000003"])
    assert "resumed at step 3" in out
    assert [record["step"] for record in read_metrics(run)] == list(range(1, 7))
    assert not list(run.glob("checkpoint/*.partial")) and not list(run.glob("checkpoint/*.deleted"))
    tiny_runs.assert_same_state(run, zoo("digits"), step=6)


def test_scripts_use_the_newest_complete_checkpoint_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(run / "checkpoint/step-00000006" / TENSORS)
    assert find_checkpoint(run / "checkpoint", None) == run / "checkpoint/step-00000003"
    assert_refused(capsys.readouterr().err, "", ["step-00000006", TENSORS, "bytes", "step-00000003"])
    with refused("", "step-00000006", TENSORS, "[3, 6]"):
        find_checkpoint(run / "checkpoint", 6)


def test_a_run_with_no_complete_checkpoint_or_that_of_another_run_does_not_start_over(
    run: Path, run_script: RunScript
) -> None:
    (run / "checkpoint/step-00000006" / MANIFEST).unlink()
    other = run / "checkpoint/step-00000003" / MANIFEST
    manifest = json.loads(other.read_text())
    manifest["trajectory"]["training.seed"] = 1
    other.write_text(json.dumps(manifest))
    before = (run / "metrics.jsonl").read_bytes()
    code, _, err = resume(run, run_script)
    assert code == 2
    there = ["step-00000006", MANIFEST, "step-00000003", "training.seed is 1 there and 0 here"]
    assert_refused(err, "", [*there, "--metrics.experiment_name"])
    assert (run / "metrics.jsonl").read_bytes() == before
