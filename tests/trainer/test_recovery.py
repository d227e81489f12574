# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Resuming on other ranks, saving during training, and a full disk. More kills are in tools/kills.py."""

from __future__ import annotations

import errno
import json
import pkgutil
import re
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from full_disk import limit_writes
from refusals import assert_refused
from tiny_runs import assert_same_state, job
from zoo import KEPT

from torchditan import load
from torchditan.checkpoint.files import final_weights, list_checkpoints, step_of
from torchditan.checkpoint.loading import read_state, verify
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.optim.ema import EMA
from torchditan.periodic_tasks import PeriodicTasks
from torchditan.run.directory import RunDirectory
from torchditan.run.reading import read_config, read_metrics, read_status

if TYPE_CHECKING:
    from zoo import Zoo

    from tests.conftest import RunDistributed, RunScript, Train

REPOSITORY = Path(__file__).resolve().parents[2]
BATCH = 12
SMALL = [
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--metrics.enable_sampling=false",
    "--metrics.log_freq=1",
    "--checkpoint.enable_checkpoint",
]
ONE_RUN = [*SMALL, "--metrics.experiment_name=run"]

RECORDING = """
import json, os, sys
sys.path.insert(0, {repository!r})
sys.argv = ["train.py", *{arguments!r}]
from torchditan.commands import train
from torchditan.data_stream.loader import TrainingStream
from torchditan.supervision.exit_status import run_job

batches = TrainingStream.batches

def recorded(self, position):
    for batch, randomness in batches(self, position):
        with open(f"{folder}/positions.{{os.environ['RANK']}}", "a") as file:
            file.write(json.dumps(batch["index"].tolist()) + "\\n")
        yield batch, randomness

TrainingStream.batches = recorded
sys.exit(run_job(train.main))
"""


def curve(run: Path) -> list[float]:
    """Loss and gradient norm of each step, one after the other."""
    return [record[key] for record in read_metrics(run) for key in ("loss", "grad_norm")]


@pytest.mark.slow
def test_a_run_continues_on_1_to_4_ranks_in_every_mode_and_loses_no_sample(
    tmp_path: Path, run_distributed: RunDistributed, run_script: RunScript
) -> None:
    """Begun with 4 images on each of 3 ranks; the global batch of 12 stays, whatever the same flags would give."""
    flags = [*ONE_RUN, "--training.batch_size=4", f"--job.dump_folder={tmp_path}"]
    legs = ((3, 3), (4, 2), (2, 1), (1, 1), (4, 4), (2, 2))  # DDP, HSDP, FSDP, one process, DDP, DDP
    for leg, (world_size, replicate) in enumerate(legs, start=1):
        degree = f"--training.data_parallel_replicate_degree={replicate}"
        arguments = [*flags, f"--training.steps={3 * leg}", degree]
        script = tmp_path / "recording.py"
        script.write_text(RECORDING.format(repository=str(REPOSITORY), arguments=arguments, folder=tmp_path))
        result = run_distributed([script], world_size)
        assert result.returncode == 0, result.stderr
    steps = 3 * len(legs)
    uninterrupted = [*SMALL, "--training.batch_size=12", f"--training.steps={steps}", "--metrics.experiment_name=one"]
    assert run_script("train.py", *uninterrupted).code == 0
    pairs = zip(curve(tmp_path / "run"), curve(tmp_path / "outputs" / "one"), strict=True)
    largest = max(abs(there - here) / here for there, here in pairs)
    print(f"largest relative difference {largest:.1e}")  # shown by pytest -s
    assert largest < 1e-5
    lines = [line for file in tmp_path.glob("positions.*") for line in file.read_text().splitlines()]
    assert sorted(position for line in lines for position in json.loads(line)) == list(range(steps * BATCH))


KILLED = """
import os, signal, sys
sys.path.insert(0, {repository!r})
from torchditan.commands import train
from torchditan.periodic_tasks import PeriodicTasks
from torchditan.supervision.exit_status import run_job

run_periodic_tasks = PeriodicTasks.run_periodic_tasks

def killed(self, *arguments, **options):
    if self.progress.step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    run_periodic_tasks(self, *arguments, **options)

PeriodicTasks.run_periodic_tasks = killed
sys.exit(run_job(train.main))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "replicate", "context", "async_mode"),
    [(1, 1, 1, "async"), (2, 2, 1, "disabled"), (2, 1, 1, "async"), (4, 2, 1, "disabled"), (2, 1, 2, "async")],
    ids=["one process", "DDP", "FSDP", "HSDP", "context parallel"],
)
def test_a_run_killed_in_any_mode_resumes_to_the_bit(
    world_size: int, replicate: int, context: int, async_mode: str, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    """`python tools/kills.py` makes more kills, at random moments."""
    flags = [*SMALL, f"--job.dump_folder={tmp_path}", "--training.steps=8", "--training.global_batch_size=8"]
    flags += [f"--training.data_parallel_replicate_degree={replicate}", f"--checkpoint.async_mode={async_mode}"]
    flags += [f"--training.context_parallel_degree={context}", "--training.batch_size=2", "--checkpoint.interval=2"]
    run, whole = ([*flags, f"--metrics.experiment_name={name}"] for name in ("run", "whole"))
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(repository=str(REPOSITORY)))
    assert run_distributed([script, *run], world_size).returncode != 0
    result = run_distributed(["tests/trainer/test_training.py", json.dumps([run, whole])], world_size)
    assert result.returncode == 0, result.stderr
    assert re.search("resumed at step [24]", result.stdout), result.stdout
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == list(range(1, 9))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole", step=8)


def test_a_micro_batch_that_does_not_fit_the_kept_global_batch_shrinks(zoo: Zoo, tmp_path: Path, train: Train) -> None:
    shutil.copytree(zoo("digits"), tmp_path / "run")
    for steps, batch_size, kept in ((7, 3, 2), (8, 100, 8)):
        flags = [
            f"--training.steps={steps}",
            f"--training.batch_size={batch_size}",
            "--training.global_batch_size=none",
        ]
        train("run", *KEPT, *flags)
        training = read_config(tmp_path / "run")["config"]["training"]
        assert (training["batch_size"], training["global_batch_size"]) == (kept, 8)


def test_ranks_that_do_not_divide_the_global_batch_are_told_which_do(
    zoo: Zoo, tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(zoo("digits"), tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(monkeypatch, "delenv", lambda *args, **kwargs: None)
    flags = ["--training.steps=7", "--training.global_batch_size=none", "--training.batch_size=8"]
    code, _, err = run_script("train.py", *job(tmp_path / "run", *KEPT, *flags))
    assert code == 2
    assert_refused(err, "training.global_batch_size = 8", [str(tmp_path / "run"), "5 ranks", "1, 2, 4, 8"])


def test_saving_beside_the_training_stores_what_saving_in_between_does(
    tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though every write begins only when the training has changed the weights since."""
    flags = ["--training.steps=6", "--training.batch_size=4", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"]
    assert run_script("train.py", *SMALL, *flags, "--metrics.experiment_name=between").code == 0
    write, updated = CheckpointManager._write, threading.Event()
    late = []

    def write_late(self: CheckpointManager, *arguments: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if len(late) < 2:
            late.append(updated.wait(timeout=30))
        write(self, *arguments)

    update = EMA.update
    monkeypatch.setattr(CheckpointManager, "_write", write_late)
    monkeypatch.setattr(EMA, "update", lambda self, step: (update(self, step), step % 2 and updated.set())[0])
    save = CheckpointManager.save
    monkeypatch.setattr(CheckpointManager, "save", lambda *args, **kw: (save(*args, **kw), updated.clear())[0])
    beside = ["--checkpoint.async_mode=async", "--metrics.experiment_name=beside"]
    code, _, err = run_script("train.py", *SMALL, *flags, *beside)
    assert code == 0, err
    assert late == [True, True]
    for step in (2, 4, 6):
        folders = [tmp_path / "outputs" / name / "checkpoint" / f"step-{step:08d}" for name in ("between", "beside")]
        verify(folders[1])
        there, here = (read_state(folder) for folder in folders)
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in there), step


def test_a_write_that_fails_beside_the_training_ends_the_run_where_it_waits(
    run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: CheckpointManager, *arguments: Any) -> None:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(CheckpointManager, "_write", broken)
    flags = ["--training.steps=4", "--training.batch_size=4", "--checkpoint.interval=2"]
    code, _, err = run_script("train.py", *ONE_RUN, *flags, "--checkpoint.async_mode=async")
    assert code == 1
    assert "RuntimeError: a defect of ours" in err


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return limit_writes(monkeypatch)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, run_script: RunScript, full_disk: list[int]
) -> None:
    full_disk.extend((4, 6))
    flags = ["--training.steps=9", "--training.batch_size=4", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=1"]
    code, out, err = run_script("train.py", *ONE_RUN, *flags, "--checkpoint.async_mode=async")
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("warning")] == [
        f"warning: no checkpoint of step {step}: File too large; the last one is step-00000002. The run continues"
        for step in (4, 6)
    ]
    folder = tmp_path / "outputs" / "run" / "checkpoint"
    assert [path.name for path in folder.iterdir()] == ["step-00000009"]
    verify(folder / "step-00000009")


def test_a_disk_that_takes_no_grid_costs_only_the_grid(
    tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self: Any, result: Any, **options: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, limits[1]))  # what the terminal shows is a file here too
        try:
            due(self, result, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    due = PeriodicTasks.run_periodic_tasks
    monkeypatch.setattr(PeriodicTasks, "run_periodic_tasks", fill)
    flags = ["--training.steps=3", "--training.batch_size=4"]
    flags += ["--metrics.enable_sampling=true", "--metrics.sample_freq=2", "--sampling.num_steps=1"]
    flags += ["--checkpoint.enable_checkpoint=false", "--checkpoint.save_final=false"]
    code, out, err = run_script("train.py", *ONE_RUN, *flags)
    assert code == 0, err
    assert "warning: no grid of step 2: File too large. The run goes on" in out
    assert [record["step"] for record in read_metrics(tmp_path / "outputs" / "run")] == [1, 2, 3]


WITH_TASKS = [
    *(f"--{option}=2" for option in ("validation.freq", "metrics.sample_freq", "evaluation.freq")),
    *("--metrics.enable_sampling=true", "--sampling.num_steps=1", "--sampling.max_classes=1"),
    *("--evaluation.num_samples=8", "--validation.num_images=8", '--evaluation.metrics=["kills_metric:Brightness"]'),
    *("--training.steps=4", "--training.batch_size=4"),
]
TASKS = {
    "validation": "torchditan.periodic_tasks.validation_losses",
    "sampling": "torchditan.sampling.sampler.Sampler.draw_all",
    "evaluation": "kills_metric.Brightness.compute",
}


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """What a run logs at a step, without times and memory."""
    kept = ("step", "images_seen", "loss", "grad_norm", "lr", "validation_loss", "brightness_generated")
    done = {name: f"{name}_s" in record for name in TASKS}
    return {key: record[key] for key in kept if key in record} | done


def test_a_task_that_fails_costs_neither_the_checkpoint_nor_the_record_of_its_step(
    tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command then repeats the task, and the run logs what a run without the failure does."""
    flags = [*SMALL, *WITH_TASKS, "--checkpoint.interval=2"]
    assert run_script("train.py", *flags, "--metrics.experiment_name=whole").code == 0
    whole = [without_times(record) for record in read_metrics(tmp_path / "outputs" / "whole")]
    write = CheckpointManager._write

    def write_slowly(self: CheckpointManager, *arguments: Any) -> None:
        time.sleep(0.3)
        write(self, *arguments)

    for number, (task, async_mode) in enumerate(zip(TASKS, ("disabled", "async", "disabled"), strict=True)):
        run, at_failure = tmp_path / "outputs" / task, list[Path]()
        own = [*flags, f"--checkpoint.async_mode={async_mode}", f"--metrics.experiment_name={task}"]

        def fail(*arguments: Any, run: Path = run, found: list[Path] = at_failure, **options: Any) -> Any:
            found.extend(list_checkpoints(run / "checkpoint"))
            raise RuntimeError("a mistake in a plug-in")

        with monkeypatch.context() as failing:
            failing.setattr(TASKS[task], fail)
            failing.setattr(CheckpointManager, "_write", write_slowly)
            code, _, err = run_script("train.py", *own)
        assert code == 1
        assert "RuntimeError: a mistake in a plug-in" in err
        assert [step_of(path) for path in at_failure] == [2]
        last = read_metrics(run)[-1]
        assert (last["step"], [name for name in TASKS if f"{name}_s" in last]) == (2, list(TASKS)[:number])
        code, _, err = run_script("train.py", *own)
        assert code == 0, err
        assert [without_times(record) for record in read_metrics(run)] == whole


@pytest.mark.parametrize("task", ["validation", "sampling"])
def test_a_task_that_fails_at_the_end_leaves_the_final_weights(
    task: str, tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command repeats it, except a validation, which needs other weights than the averaged ones."""
    flags = [*ONE_RUN, *WITH_TASKS, "--checkpoint.enable_checkpoint=false", "--checkpoint.save_final"]
    run = tmp_path / "outputs" / "run"

    def fail(*arguments: Any, **options: Any) -> Any:
        if final_weights(run / "checkpoint") is not None:
            raise RuntimeError("a mistake in a plug-in")
        return work(*arguments, **options)

    work = pkgutil.resolve_name(TASKS[task])
    with monkeypatch.context() as failing:
        failing.setattr(TASKS[task], fail)
        assert run_script("train.py", *flags).code == 1
    assert load(run).step == 4
    assert run_script("train.py", *flags).code == 0
    records = read_metrics(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert {name for name in TASKS if f"{name}_s" not in records[-1]} == {task} & {"validation"}


def test_a_last_checkpoint_that_cannot_be_written_is_no_success(
    tmp_path: Path, run_script: RunScript, full_disk: list[int]
) -> None:
    full_disk.append(4)
    flags = ["--training.steps=4", "--training.batch_size=4", "--checkpoint.interval=2"]
    code, _, err = run_script("train.py", *ONE_RUN, *flags)
    assert code == 1
    status = read_status(tmp_path / "outputs" / "run")
    assert (status["state"], status["step"]) == ("error", 4)
    assert status["reason"].startswith("the last checkpoint could not be written: File too large; the same command")
    assert err == f"error: {status['reason']}\n"
    assert [path.name for path in (tmp_path / "outputs" / "run" / "checkpoint").iterdir()] == ["step-00000002"]
    full_disk.clear()
    assert run_script("train.py", *ONE_RUN, *flags).code == 0
    assert [record["step"] for record in read_metrics(tmp_path / "outputs" / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_full_disk_at_the_end_keeps_the_last_weights_and_a_complete_checkpoint(
    async_mode: str, tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk = limit_writes(monkeypatch, size=2_000_000)
    full_disk.append(6)
    flags = ["--training.steps=6", "--training.batch_size=4", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=1"]
    keep = "--checkpoint.keep_latest_k=3"
    code, out, err = run_script("train.py", *ONE_RUN, *flags, keep, f"--checkpoint.async_mode={async_mode}")
    assert code == 0, err
    assert [text for text in out.splitlines() if text.startswith("warning")] == [
        text for text in out.splitlines() if "File too large; step 6 is saved without the optimizer" in text
    ]
    run = tmp_path / "outputs" / "run"
    assert [step_of(path) for path in list_checkpoints(run / "checkpoint")] == [2, 4]
    last = load(run)
    assert last.step == 6
    averaged = last.model.state_dict()
    full_disk.clear()
    assert run_script("train.py", *ONE_RUN, *flags).code == 0
    assert not list(run.glob("checkpoint/*.safetensors"))
    state = read_state(run / "checkpoint" / "step-00000006")
    assert "optimizer" in {name.partition(".")[0] for name in state}
    assert all(torch.equal(averaged[name], state[f"ema.{name}"]) for name in averaged)


def test_final_weights_that_cannot_be_written_are_no_success(
    tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torchditan.checkpoint.weights.write_weights", fail)
    flags = ["--training.steps=2", "--training.batch_size=4", "--checkpoint.enable_checkpoint=false"]
    assert run_script("train.py", *ONE_RUN, *flags, "--checkpoint.save_final").code == 1
    status = read_status(tmp_path / "outputs" / "run")
    assert status["state"] == "error"
    assert "No space left on device; the same command starts again from the first step" in status["reason"]
    assert list((tmp_path / "outputs" / "run").glob("checkpoint/*")) == []


def test_a_disk_that_takes_no_new_file_gets_the_status_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    directory = RunDirectory(tmp_path / "run", is_writer=True)
    directory.open({}, trajectory={})
    directory.write_status("error", "a long reason of an earlier attempt", step=3)
    monkeypatch.setattr("torchditan.run.directory.write_file", full)
    directory.write_status("completed", step=4)
    status = read_status(tmp_path / "run")
    assert (status["state"], status["reason"], status["step"]) == ("completed", None, 4)
    assert capsys.readouterr().err == ""


def test_metrics_that_a_full_disk_does_not_take_are_written_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path / "run", is_writer=True)
    directory.open({}, trajectory={})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 101):
        resource.setrlimit(resource.RLIMIT_FSIZE, (500 if 10 <= step < 90 else limits[0], limits[1]))
        try:
            directory.append_metrics({"step": step, "loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if step == 50:
            assert (tmp_path / "run" / "metrics.jsonl").stat().st_size == 500
    for size, figures in ((500, {"FD": 1.0}), (limits[0], {"KID": 2.0})):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        directory.extend_last_metrics(figures)
    directory.close()
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, 101))
    assert records[-1] == {"step": 100, "loss": 1.0, "KID": 2.0}
    errors = capsys.readouterr().err
    assert errors.count("metrics.jsonl cannot be written (File too large); its lines are kept") == 1
    assert errors.count("metrics.jsonl cannot be written (File too large); its last line lacks {'FD': 1.0}") == 1
