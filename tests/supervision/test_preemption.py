# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A run that gets a stop signal finishes its step on every rank, saves, and resumes there; a second signal ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny_runs import assert_same_state

from torchditan.checkpoint.files import list_checkpoints, step_of
from torchditan.run.reading import read_metrics, read_status
from torchditan.supervision.rank_status import RANKS_VARIABLE, read_rank_statuses

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    str(REPOSITORY / "train.py"),
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--dataset.num_workers=1",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=4",
    "--metrics.enable_sampling=false",
    "--metrics.log_freq=1",
    "--metrics.experiment_name=run",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=100000",
]
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--max-restarts=2"]


@contextmanager
def training(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has done its first steps, in a session of its own; killed at the end if it is still there."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", RANKS_VARIABLE: str(folder / "ranks")}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step") and line.split()[1].startswith("3/"):
                break
        yield process
    finally:
        process.kill()
        process.communicate()


LIST_THREADS = """
import atexit, pathlib, runpy, sys
names = lambda: [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
atexit.register(lambda: print("threads:", *names()))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def status_of(folder: Path) -> dict[str, object]:
    status = read_status(folder / "outputs" / "run")
    assert status is not None
    return status


def test_ctrl_c_saves_the_step_and_the_same_command_continues_to_the_bit(tmp_path: Path, run_script: RunScript) -> None:
    with training(tmp_path, "-c", LIST_THREADS, *SMALL, "--training.steps=100000") as process:
        os.killpg(process.pid, signal.SIGINT)  # to the loader's worker too, as a terminal or a cluster does
        out, errors = process.communicate(timeout=30)
    status = status_of(tmp_path)
    step = int(str(status["step"]))
    assert process.returncode == 75
    assert errors == f"stopped by SIGINT after step {step}; the same command continues there\n"
    assert (status["state"], status["reason"]) == ("interrupted", errors.strip())
    # A thread of a process group that asks for the GIL while the interpreter shuts down would abort the process.
    assert "gloo" not in out.split("threads:")[1]
    runs = [tmp_path / "outputs" / name for name in ("run", "uninterrupted")]
    assert [step_of(path) for path in list_checkpoints(runs[0] / "checkpoint")] == [step]
    for run in runs:
        flags = [f"--training.steps={step + 3}", f"--metrics.experiment_name={run.name}"]
        assert run_script(*SMALL, *flags).code == 0
    curves = [[(record["step"], record["loss"], record["grad_norm"]) for record in read_metrics(run)] for run in runs]
    assert curves[0] == curves[1]
    assert_same_state(*runs, step=step + 3)


@pytest.mark.slow
def test_ranks_agree_though_the_signal_reaches_one_and_torchrun_starts_none_of_them_again(tmp_path: Path) -> None:
    with training(tmp_path, *TORCHRUN, "--nproc_per_node=2", *SMALL, "--training.steps=100000") as process:
        ranks = read_rank_statuses(tmp_path / "ranks")
        os.kill(ranks[1]["pid"], signal.SIGUSR1)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors  # so that torchrun takes it for done; scripts/launch.sh exits with 75
    status = status_of(tmp_path)
    assert status["state"] == "interrupted"
    assert errors.count("stopped by SIGUSR1 after step") == 1
    ended = read_rank_statuses(tmp_path / "ranks")
    assert [(rank["state"], rank["step"], rank["exit_code"]) for rank in ended] == [
        ("interrupted", status["step"], 75)
    ] * 2
    assert [rank["pid"] for rank in ended] == [rank["pid"] for rank in ranks]  # nothing was started again


IN_A_STEP_WITHOUT_END = """
import sys
sys.path.insert(0, {repository!r})
from torchditan.supervision.preemption import StopRequest
with StopRequest():
    import hashlib
    print("step", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # for minutes; no signal handler of Python runs meanwhile
"""


def test_a_second_signal_ends_a_rank_at_once_whatever_it_is_in(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(IN_A_STEP_WITHOUT_END.format(repository=str(REPOSITORY)))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):  # one request: they come together
        process.send_signal(number)
    time.sleep(1.5)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - start < 5
    assert (process.returncode, errors) == (75, "SIGINT again: exiting immediately\n")


WITHOUT_DATA = """
import multiprocessing, os, signal, sys, threading, time
import torch
from torchditan.commands import train
from torchditan.job import prepare
from torchditan.data_stream.datasets import SequentialDataset
from torchditan.supervision import preemption
from torchditan.supervision.exit_status import run_job
from torchditan.trainer import Trainer

class Shard(torch.utils.data.IterableDataset):
    def __init__(self, rank):
        self.is_full = rank == 0

    def __iter__(self):
        while True:
            if self.is_full or torch.utils.data.get_worker_info().id == 0:
                yield {"sample": torch.zeros(1, 8, 8)}
            else:
                time.sleep(0.1)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

class Source(SequentialDataset):
    name, sample_shape, class_names, horizontal_flip = "shards", (1, 8, 8), [], False

    def iterate(self, *, rank, world_size):
        return Shard(rank + 2 - world_size)

def count_step(trainer):  # the loader has started
    count(trainer)
    preemption._LONG_WAIT_S, preemption._PATIENCE_S = 1.0, 2.0

def describe(trainer):
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return describe_wait(trainer)

count, describe_wait = Trainer.count_step, Trainer.describe_wait
Trainer.count_step, Trainer.describe_wait = count_step, describe
multiprocessing.set_start_method("fork", force=True)  # as without the tests' own processes
prepare.build_dataset = lambda *args, **kwargs: Source()
sys.exit(run_job(train.main))
"""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [None, 2])
def test_a_rank_without_data_says_so_and_ends_after_a_signal(
    world_size: int | None, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    pytest.importorskip("torchdata")
    script = tmp_path / "without_data.py"
    script.write_text(WITHOUT_DATA)
    flags = ["--dataset.dataset_name=imagenet_hub", "--dataset.streaming", "--dataset.num_workers=2"]
    flags += ["--checkpoint.interval=1", "--training.steps=9", "--dataset.num_classes=0"]
    result = run_distributed([script, *SMALL[1:], *flags], world_size, cwd=tmp_path, timeout=120)
    rank = 0 if world_size is None else 1
    waits = f"rank {rank} waits for worker 1 of 2 (counted from 0) on dataset shards"
    assert result.stderr.count("no data for ") == 1 and f" s: {waits}\n" in result.stderr, result.stderr
    status = status_of(tmp_path)
    assert "stopped by SIGTERM, without data for" in str(status["reason"]) and waits in str(status["reason"])
    assert (status["state"], status["step"]) == ("interrupted" if world_size is None else "error", 1)
    assert [step_of(path) for path in list_checkpoints(tmp_path / "outputs" / "run" / "checkpoint")] == [1]
    if world_size is None:
        assert result.returncode == 75
