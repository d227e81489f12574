# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A run writes only to its folder, never mixes with another run, and leaves no partial file."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from refusals import refused

from torchditan.errors import ConfigError
from torchditan.run import atomic_files
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import RunDirectory
from torchditan.run.reading import read_config, read_metrics, read_status

CONFIG = {"model": {"patch_size": 2}, "metrics": {"log_freq": 10, "save_tb_folder": "tensorboard"}}
TRAJECTORY = {"model": {"patch_size": 2}, "optimizer": {"lr": 1e-4, "betas": (0.9, 0.999)}}


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "outputs" / "x", is_writer=True)
    directory.open(CONFIG, trajectory=TRAJECTORY, world_size=2)
    yield directory
    directory.close()


def reopened(run, config=CONFIG, **options):
    """The same folder, opened by another process."""
    again = RunDirectory(run.path, is_writer=True)
    again.open(config, trajectory=TRAJECTORY, **options)
    return again


def test_config_json_holds_config_versions_and_hardware_and_a_resume_may_change_what_is_not_trajectory(run):
    stored = read_config(run.path)
    assert stored["config"] == CONFIG
    assert stored["trajectory"]["optimizer"] == {"lr": 1e-4, "betas": [0.9, 0.999]}
    assert stored["versions"].keys() == {"python", "torch", "torchditan"}
    assert stored["hardware"]["device"] == "cpu" and stored["hardware"]["device_count"] == 2
    assert stored["hardware"]["device_name"] and stored["hardware"]["hostname"]
    assert "git_commit" in stored
    run.close()
    again = reopened(run, {**CONFIG, "metrics": {"log_freq": 1}}, world_size=4)
    second = read_config(run.path)
    again.close()
    assert second["config"]["metrics"]["log_freq"] == 1 and second["hardware"]["device_count"] == 4
    assert second["run_id"] == stored["run_id"] and second["created"] == stored["created"]


def test_other_trajectory_is_refused_naming_keys_and_both_values(run):
    run.append_metrics({"step": 1})
    run.write_status("completed")
    run.close()
    before = snapshot(run.path)
    other = {"model": {"patch_size": 4}, "optimizer": {"lr": 1e-4, "betas": (0.9, 0.999)}, "seed": 3}
    again = RunDirectory(run.path, is_writer=True)
    with pytest.raises(ConfigError) as refused:
        again.open(CONFIG, trajectory=other)
    message = str(refused.value)
    assert "model.patch_size is 2 there and 4 here" in message
    assert "seed is absent there and 3 here" in message
    assert "optimizer" not in message
    assert "resume" in message and "--metrics.experiment_name" in message and "\n" not in message
    assert snapshot(run.path) == before


def test_what_a_killed_process_had_half_written_is_removed(run):
    run.close()
    (run.path / "samples").mkdir()
    left = [run.path / ".status.json.here-1.partial", run.path / "samples" / ".step_00000001.png.here-1.partial"]
    for path in left:
        path.write_text("{")
    reopened(run).close()
    assert not any(path.exists() for path in left)


def test_a_restart_waits_for_the_lock_of_a_lost_machine(run, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    releasing = threading.Timer(0.3, run.close)
    releasing.start()
    reopened(run).close()
    releasing.join()


def test_second_run_in_the_same_folder_is_refused_naming_the_process(run):
    before = snapshot(run.path)
    with pytest.raises(ConfigError, match=rf"x is in use by process PID {os.getpid()} on "):
        RunDirectory(run.path, is_writer=True).open(CONFIG, trajectory=TRAJECTORY)
    assert snapshot(run.path) == before


def hold_lock(number: int, folder: str) -> None:
    run = RunDirectory(Path(folder), is_writer=True)
    run.open({}, trajectory={"seed": 0})
    if os.fork() == 0:
        write_file(Path(folder, "worker"), str(os.getpid()).encode())
    time.sleep(60)


@pytest.mark.usefixtures("fork_server")
def test_sigkill_drops_the_lock_even_while_a_forked_worker_lives(tmp_path):
    context = mp.start_processes(hold_lock, args=(str(tmp_path),), nprocs=1, join=False, start_method="forkserver")
    (process,) = context.processes
    deadline = time.monotonic() + 60
    while not (tmp_path / "worker").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    worker = int((tmp_path / "worker").read_text())
    again = RunDirectory(tmp_path, is_writer=True)
    try:
        with pytest.raises(ConfigError, match=f"PID {process.pid} "):
            again.open({}, trajectory={"seed": 0})
        process.kill()
        process.join()
        os.kill(worker, 0)  # still there
        again.open({}, trajectory={"seed": 0})
    finally:
        process.kill()
        os.kill(worker, signal.SIGKILL)
        again.close()


def test_other_ranks_write_nothing(tmp_path):
    directory = RunDirectory(tmp_path / "x", is_writer=False)
    directory.open(CONFIG, trajectory=TRAJECTORY)
    directory.append_metrics({"step": 1})
    directory.truncate_metrics(0)
    directory.write_status("running")
    directory.discard()
    directory.close()
    assert not (tmp_path / "x").exists()


def test_discard_leaves_nothing_of_a_new_run_and_keeps_what_was_there(tmp_path):
    (tmp_path / "launcher.log").write_text("mine")
    for folder in (tmp_path / "outputs" / "x", tmp_path):
        directory = RunDirectory(folder, is_writer=True)
        directory.open(CONFIG, trajectory=TRAJECTORY)
        directory.write_status("running")
        directory.discard()
        assert [path.name for path in tmp_path.iterdir()] == ["launcher.log"]


@pytest.mark.parametrize("evidence", ["metrics.jsonl", "checkpoint/step-00000010/x"])
def test_discard_keeps_a_run_that_trained(run, evidence):
    (run.path / evidence).parent.mkdir(parents=True, exist_ok=True)
    (run.path / evidence).write_text("trained")
    run.discard()
    assert (run.path / evidence).exists() and run.config_path.exists()


def test_discard_leaves_a_resumed_run_as_it_was(run):
    run.write_status("completed", step=3)
    run.close()
    before = {name: content for name, (content, _) in snapshot(run.path).items()}
    again = reopened(run, {**CONFIG, "job": {"description": "again"}})
    again.write_status("running", step=0)
    again.discard()
    assert {name: content for name, (content, _) in snapshot(run.path).items()} == before


def test_status_says_state_reason_step_time_rank(run):
    run.write_status("oom", "tried to allocate 2 GiB", step=7, rank=3)
    status = read_status(run.path)
    assert status.pop("time").startswith("20")
    assert status == {"state": "oom", "reason": "tried to allocate 2 GiB", "step": 7, "rank": 3}


def test_metrics_lines_are_valid_json_and_readable_at_once(run):
    run.append_metrics({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "nested": [float("-inf")]})
    text = run.metrics_path.read_text()

    def reject(token: str) -> None:
        raise AssertionError(token)

    assert text.endswith("\n")
    assert json.loads(text, parse_constant=reject) == {"step": 1, "loss": None, "grad_norm": None, "nested": [None]}
    run.append_metrics({"step": 2})
    assert [record["step"] for record in read_metrics(run.path)] == [1, 2]


def test_resume_drops_later_steps_and_a_torn_line(run):
    for step in (10, 20, 30):
        run.append_metrics({"step": step, "loss": 1 / 3})
    run.close()
    kept = run.metrics_path.read_bytes().splitlines(keepends=True)[:2]
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 40, "na')
    assert [record["step"] for record in read_metrics(run.path)] == [10, 20, 30], "readers skip it"
    again = reopened(run)
    again.truncate_metrics(20)
    assert run.metrics_path.read_bytes() == b"".join(kept)
    again.append_metrics({"step": 21})
    again.close()
    assert [record["step"] for record in read_metrics(run.path)] == [10, 20, 21]


def test_a_place_next_to_a_run_names_what_is_there(tmp_path):
    (tmp_path / "outputs/a").mkdir(parents=True)
    (tmp_path / "outputs/a/config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"")
    with refused(f"{tmp_path}/outputs is not a run directory: it has no config.json; it contains {tmp_path}/outputs/a"):
        read_config(tmp_path / "outputs")
    with refused(f"{tmp_path}/a.safetensors is a file", f"torchditan import {tmp_path}/a.safetensors outputs/a"):
        read_config(tmp_path / "a.safetensors")


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_file(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(atomic_files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_begun_anew_keeps_what_the_earlier_attempt_measured(run):
    for attempt in (1, 2, 3):
        run.truncate_metrics(0)
        run.append_metrics({"step": 1, "loss": attempt})
    assert [record["loss"] for record in read_metrics(run.path)] == [3]
    earlier = [(run.path / f"metrics.jsonl.{number}").read_text() for number in (1, 2)]
    assert ['"loss": 1' in earlier[0], '"loss": 2' in earlier[1]] == [True, True]
