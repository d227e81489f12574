# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A damaged checkpoint is never used: every file is damaged in several ways, and the manifest is edited."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import assert_refused, refused

from torchditan.checkpoint import manager
from torchditan.checkpoint.files import (
    INDEX,
    MANIFEST,
    CheckpointReader,
    DamagedCheckpointError,
    list_checkpoints,
    verify,
)
from torchditan.checkpoint.loading import read_state
from torchditan.checkpoint.trained_weights import find_checkpoint
from torchditan.run.reading import read_metrics, read_status
from torchditan.weights.exported import export_weights
from torchditan.weights.trained_model import TrainedModel

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunScript

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=4",
    "--metrics.enable_sampling=false",
    "--metrics.log_freq=1",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=2",
    "--checkpoint.keep_latest_k=0",
    "--metrics.experiment_name=run",
]
FILES = [INDEX, "__0_0.distcp", "config.json", "progress.json", MANIFEST]
Damage = Callable[[Path, str], None]


@pytest.fixture(scope="module")
def trained(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints of 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    run_alone("train.py", *SMALL, "--training.steps=6", f"--job.dump_folder={folder}")
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it to damage, where `python train.py` finds it."""
    return Path(shutil.copytree(trained, tmp_path / "outputs" / "run"))


def truncate(file: Path, size: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(size)


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def cut_in_half(checkpoint: Path, name: str) -> None:
    truncate(checkpoint / name, (checkpoint / name).stat().st_size // 2)


def cut_by_a_byte(checkpoint: Path, name: str) -> None:
    truncate(checkpoint / name, (checkpoint / name).stat().st_size - 1)


def empty(checkpoint: Path, name: str) -> None:
    truncate(checkpoint / name, 0)


def flip_a_bit_at_its_begin(checkpoint: Path, name: str) -> None:
    flip(checkpoint / name, 0)


def flip_a_bit_in_its_middle(checkpoint: Path, name: str) -> None:
    flip(checkpoint / name, (checkpoint / name).stat().st_size // 2)


def flip_a_bit_at_its_end(checkpoint: Path, name: str) -> None:
    flip(checkpoint / name, -1)


def fill_a_page_with_zeros(checkpoint: Path, name: str) -> None:
    file = checkpoint / name
    data = file.read_bytes()
    file.write_bytes(bytes(min(4096, len(data))) + data[4096:])


def append_a_byte(checkpoint: Path, name: str) -> None:
    with (checkpoint / name).open("ab") as stream:
        stream.write(b"\0")


def delete(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()


def put_a_folder_in_its_place(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()


def swap_with_that_of_another_step(checkpoint: Path, name: str) -> None:
    other = checkpoint.parent / "step-00000004"
    if name == "config.json":  # the same in every checkpoint of a run: that of another run instead
        (checkpoint / name).write_text((checkpoint / name).read_text().replace('"seed": 0', '"seed": 1'))
    else:
        shutil.copy(other / name, checkpoint / name)


DAMAGES: list[Damage] = [
    cut_in_half,
    cut_by_a_byte,
    empty,
    flip_a_bit_at_its_begin,
    flip_a_bit_in_its_middle,
    flip_a_bit_at_its_end,
    fill_a_page_with_zeros,
    append_a_byte,
    delete,
    put_a_folder_in_its_place,
    swap_with_that_of_another_step,
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named(damage: Damage, name: str, run: Path) -> None:
    checkpoint = run / "checkpoint" / "step-00000006"
    verify(checkpoint)
    damage(checkpoint, name)
    with pytest.raises(DamagedCheckpointError) as error:
        verify(checkpoint)
    assert str(error.value).startswith(name)
    verify(run / "checkpoint" / "step-00000004")


def edit_manifest(checkpoint: Path, **changes: Any) -> None:
    """Write the manifest anew, with a checksum of itself that is right."""
    content = {**json.loads((checkpoint / MANIFEST).read_text()), **changes}
    content.pop("sha256")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({**content, "sha256": digest}))


def files_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / MANIFEST).read_text())["files"]


EDITS: list[tuple[str, Callable[[Path], dict[str, Any]], str, list[str]]] = [
    ("another step", lambda _: {"step": 4}, MANIFEST, ["step 4"]),
    ("no step", lambda _: {"step": None}, MANIFEST, ["manifest"]),
    ("a later format", lambda _: {"format": 3}, MANIFEST, ["format 3", "1 and 2"]),
    ("a list of files", lambda _: {"files": []}, MANIFEST, ["manifest"]),
    ("no trajectory", lambda _: {"trajectory": None}, MANIFEST, ["manifest"]),
    ("a file left out", lambda at: {"files": _without(files_of(at), INDEX)}, INDEX, ["belong"]),
    ("a file too many", lambda at: {"files": {**files_of(at), "x": [1, ""]}}, "x", ["missing"]),
    ("a path outside", lambda at: {"files": {**files_of(at), "../x": [1, ""]}}, MANIFEST, ["manifest"]),
    ("another size", lambda at: {"files": {**files_of(at), INDEX: [3, ""]}}, INDEX, ["bytes", "3"]),
    ("a size in words", lambda at: {"files": {**files_of(at), INDEX: ["3", ""]}}, MANIFEST, ["manifest"]),
    (
        "another checksum",
        lambda at: {"files": {**files_of(at), INDEX: [files_of(at)[INDEX][0], "0" * 64]}},
        INDEX,
        ["checksum"],
    ),
]


def _without(files: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in files.items() if key != name}


@pytest.mark.parametrize(
    ("changes", "about", "mentions"), [edit[1:] for edit in EDITS], ids=[edit[0] for edit in EDITS]
)
def test_a_manifest_that_was_edited_is_refused_even_with_its_own_checksum_right(
    changes: Callable[[Path], dict[str, Any]], about: str, mentions: list[str], run: Path
) -> None:
    checkpoint = run / "checkpoint" / "step-00000006"
    edit_manifest(checkpoint)
    verify(checkpoint)  # that alone is no damage
    edit_manifest(checkpoint, **changes(checkpoint))
    with pytest.raises(DamagedCheckpointError) as error:
        verify(checkpoint)
    assert_refused(str(error.value), about, mentions)


def test_a_folder_under_another_steps_name_is_refused(run: Path) -> None:
    renamed = (run / "checkpoint" / "step-00000006").rename(run / "checkpoint" / "step-00000008")
    with pytest.raises(DamagedCheckpointError) as error:
        verify(renamed)
    assert_refused(str(error.value), MANIFEST, ["step 6"])


def test_a_file_or_an_empty_folder_under_a_checkpoints_name_is_refused(run: Path) -> None:
    for step, make in ((8, Path.touch), (9, Path.mkdir)):
        path = run / "checkpoint" / f"step-0000000{step}"
        make(path)
        with pytest.raises(DamagedCheckpointError) as error:
            verify(path)
        assert_refused(str(error.value), MANIFEST)


def place_of_tensor(checkpoint: Path, name: str) -> tuple[int, int]:
    """Offset and length of a tensor in the only file of tensors."""
    places = CheckpointReader(checkpoint).read_metadata().storage_data
    (place,) = [place for index, place in places.items() if index.fqn == name]
    return place.offset, place.length


def test_weights_are_verified_when_they_are_read_and_nothing_else_is(run: Path) -> None:
    checkpoint = run / "checkpoint" / "step-00000006"
    intact = TrainedModel.load(run).model.state_dict()
    for name in ("model.x_embedder.proj.weight", "optimizer.state.x_embedder.proj.weight.exp_avg"):
        start, length = place_of_tensor(checkpoint, name)
        flip(checkpoint / "__0_0.distcp", start + length // 2)
    loaded = TrainedModel.load(run)  # the averaged weights
    assert loaded.step == 6
    assert all(torch.equal(tensor, intact[name]) for name, tensor in loaded.model.state_dict().items())
    with refused("", f"{checkpoint}", "__0_0.distcp does not match its checksum", "other steps are [2, 4]"):
        TrainedModel.load(run, weights="raw")


def test_a_damaged_tensor_leaves_no_export(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoint" / "step-00000006"
    start, length = place_of_tensor(checkpoint, "ema.x_embedder.proj.weight")
    flip(checkpoint / "__0_0.distcp", start + length // 2)
    with refused("", f"{checkpoint}", "__0_0.distcp does not match its checksum", "other steps are [2, 4]"):
        export_weights(run, tmp_path / "exported" / "weights.safetensors")
    assert list((tmp_path / "exported").iterdir()) == []


def test_checkpoints_with_one_checksum_per_file_of_tensors_are_read_and_verified(run: Path) -> None:
    """Those of earlier versions."""
    checkpoint = run / "checkpoint" / "step-00000006"
    state = read_state(checkpoint)
    tensors = checkpoint / "__0_0.distcp"
    whole = [tensors.stat().st_size, hashlib.sha256(tensors.read_bytes()).hexdigest()]
    edit_manifest(checkpoint, format=1, files={**files_of(checkpoint), tensors.name: whole})
    again = read_state(checkpoint)
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())
    flip_a_bit_in_its_middle(checkpoint, tensors.name)
    with pytest.raises(DamagedCheckpointError, match="does not match its checksum"):
        read_state(checkpoint)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_checkpoint_that_reads_back_otherwise_counts_only_without_verify_after_write(
    async_mode: str, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest = manager.write_manifest

    def write_and_damage(partial: Path, **content: Any) -> None:
        write_manifest(partial, **content)
        if content["step"] == 2:
            flip_a_bit_in_its_middle(partial, "__0_0.distcp")

    monkeypatch.setattr(manager, "write_manifest", write_and_damage)
    flags = [*SMALL, "--training.steps=4", f"--checkpoint.async_mode={async_mode}"]
    assert run_script("train.py", *flags).code == 0
    code, out, _ = run_script("train.py", *flags, "--checkpoint.verify_after_write", "--metrics.experiment_name=safe")
    assert code == 0
    (line,) = [line for line in out.splitlines() if "no checkpoint of step" in line]
    assert_refused(line, "warning: no checkpoint of step 2", ["__0_0.distcp", "does not read back as written"])
    folders = [Path("outputs") / name / "checkpoint" for name in ("run", "safe")]
    assert [len(list_checkpoints(folder)) for folder in folders] == [2, 1]


def resume(run_script: RunScript, *flags: str) -> Any:
    return run_script("train.py", *SMALL, "--training.steps=8", *flags)


def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_which_are_not(
    run: Path, run_script: RunScript
) -> None:
    shutil.copytree(run, run.parent / "untouched")
    flip_a_bit_in_its_middle(run / "checkpoint" / "step-00000006", "__0_0.distcp")
    cut_in_half(run / "checkpoint" / "step-00000004", "progress.json")
    code, out, err = resume(run_script)
    assert code == 0, err
    newest, older = err.splitlines()
    where = "warning: outputs/run/checkpoint"
    assert_refused(newest, f"{where}/step-00000006", ["__0_0.distcp", "checksum", "step-00000002"])
    size = (run.parent / "untouched/checkpoint/step-00000004/progress.json").stat().st_size
    sizes = [f"{size // 2} bytes", str(size)]
    assert_refused(older, f"{where}/step-00000004", ["progress.json", *sizes, "step-00000002"])
    assert "resumed at step 2" in out
    assert [record["step"] for record in read_metrics(run)] == list(range(1, 9))
    verify(run / "checkpoint" / "step-00000006")  # trained and written anew
    assert run_script("train.py", *SMALL, "--training.steps=8", "--metrics.experiment_name=untouched").code == 0
    states = [read_state(run.parent / name / "checkpoint" / "step-00000008") for name in ("run", "untouched")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_a_run_without_a_whole_checkpoint_is_not_begun_anew(run: Path, run_script: RunScript) -> None:
    for checkpoint in list_checkpoints(run / "checkpoint"):
        delete(checkpoint, MANIFEST)
    before = (run / "metrics.jsonl").read_bytes()
    code, _, err = resume(run_script)
    assert code == 2
    each = [f"outputs/run/checkpoint/step-0000000{step}" for step in (6, 4, 2)]
    assert_refused(err, "", [*each, MANIFEST, "No such file or directory", "--metrics.experiment_name"])
    assert (run / "metrics.jsonl").read_bytes() == before
    assert read_status(run)["state"] == "completed"  # as the run of before left it


def test_a_checkpoint_of_another_run_is_refused(run: Path, run_script: RunScript) -> None:
    flags = ["--training.seed=1", "--training.steps=4", "--metrics.experiment_name=other"]
    assert run_script("train.py", *SMALL, *flags).code == 0
    for step in (2, 4, 6):
        shutil.rmtree(run / "checkpoint" / f"step-0000000{step}")
    shutil.copytree(run.parent / "other" / "checkpoint" / "step-00000004", run / "checkpoint" / "step-00000004")
    code, _, err = resume(run_script)
    assert code == 2
    assert_refused(err, "", ["outputs/run/checkpoint/step-00000004", "training.seed is 1 there and 0 here"])


def test_scripts_too_use_the_newest_whole_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoint"
    flip_a_bit_at_its_end(folder / "step-00000006", INDEX)
    assert find_checkpoint(folder, None) == folder / "step-00000004"
    line = capsys.readouterr().err
    assert_refused(line, f"warning: {folder}/step-00000006", [INDEX, "checksum", "step-00000004"])
    with refused("", f"{folder}/step-00000006", "[2, 4, 6]"):
        find_checkpoint(folder, 6)


def test_what_killed_runs_left_is_removed(run: Path, run_script: RunScript) -> None:
    for left in ("step-00000008.partial", "step-00000002.deleted", "step-00000004.replaced"):
        shutil.copytree(run / "checkpoint" / "step-00000006", run / "checkpoint" / left)
    (run / "checkpoint" / "notes.partial").mkdir()  # somebody else's
    assert resume(run_script).code == 0
    names = sorted(path.name for path in (run / "checkpoint").iterdir())
    assert names == ["notes.partial", *(f"step-0000000{step}" for step in (2, 4, 6, 8))]
