# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The job names a killed or stuck rank, its other ranks exit in time, and it can be resumed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from test_launch import TINY, TRAINER, end_of, environment, processes_in, wait_for

from torchditan.distributed.process_group import Rank
from torchditan.run.reading import read_metrics, read_status
from torchditan.supervision import watchdog
from torchditan.supervision.exit_status import is_peer_failure
from torchditan.supervision.watchdog import RankWatch

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunDistributed

SCRIPTS = TRAINER.parent / "scripts"
CLOSED = RuntimeError("Connection closed by peer [127.0.0.1]:63700")
TIMED_OUT = RuntimeError("Timed out waiting 4000ms for recv operation to complete")


class Store:
    """The process group's, without a network. Rank 1 of 2 has published where it is."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}
        self.process = ("elsewhere", 1)

    def clone(self) -> Store:
        return self

    def set_timeout(self, timeout: Any) -> None:
        pass

    def set(self, key: str, text: str) -> None:
        self.records[key] = json.loads(text)

    def get(self, key: str) -> str:
        return json.dumps(self.records[key])

    def multi_get(self, keys: list[str]) -> list[str]:
        return [self.get(key) for key in keys]

    def meet(self, processes: list[Any], own: Any) -> None:
        processes[:] = [own, self.process]

    def says(self, rank: int, **record: Any) -> None:
        """What `rank` tells the others."""
        known = {"rank": rank, "beat": 1, "step": 7, "place": "forward and backward", "seconds": 6.0, "began": 10}
        self.records[f"watch/{rank}"] = {**known, "leaving": None, **self.records.get(f"watch/{rank}", {}), **record}


MakeWatch = Callable[..., RankWatch]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Looking for the reason takes moments instead of seconds."""
    store = Store()
    store.says(1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "all_gather_object", store.meet)
    monkeypatch.setattr(watchdog, "_collectives", lambda: {("0", False): (12, 12)})
    monkeypatch.setattr(watchdog, "_newest_collective", lambda: "gloo:all_reduce")
    monkeypatch.setattr(watchdog, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.2)
    monkeypatch.setattr(watchdog, "_BEAT_S", 0.01)
    return store


@pytest.fixture
def watch(store: Store, tmp_path: Path) -> Iterator[MakeWatch]:
    """`watch()`: that of rank 0, closed at the end."""
    watches = []

    def make(rank: int = 0, on_lost: Callable[[str], None] = lambda cause: None) -> RankWatch:
        own = Rank(rank=rank, local_rank=0, world_size=2)
        watches.append(RankWatch(own, timeout_seconds=5, on_lost=on_lost, folder=tmp_path))
        return watches[-1]

    yield make
    for made in watches:
        made.close()


@pytest.fixture
def neighbour(store: Store) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that rank 1 says it is."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    store.process = (socket.gethostname(), process.pid)
    yield process
    process.kill()
    process.wait()


SEEN = "last seen in step 7, forward and backward"
KILLED = f"lost rank 1: killed by SIGKILL (possibly by the system, out of memory), {SEEN}"


@pytest.mark.parametrize(("leaving", "reason"), [(None, KILLED), ("", None)])
def test_a_killed_rank_is_named_with_its_signal_unless_it_said_that_it_leaves(
    leaving: str | None, reason: str | None, watch: MakeWatch, neighbour: subprocess.Popen[bytes], store: Store
) -> None:
    own = watch()
    store.says(1, leaving=leaving)
    neighbour.kill()
    assert own.explain(CLOSED, "closed") == reason


def test_a_rank_that_gives_no_sign_is_named_with_the_collective(watch: MakeWatch, store: Store) -> None:
    store.says(1, beat=0)
    assert watch().explain(TIMED_OUT, "timed out") == (
        f"lost rank 1: no sign of it for about 0 s (stopped, or its machine is gone), {SEEN}; rank 0 waited for it in "
        "gloo:all_reduce"
    )


def test_rank_0_is_named_where_its_store_never_answers(
    watch: MakeWatch, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = watch(rank=1)
    for request in ("get", "multi_get", "set"):
        monkeypatch.setattr(store, request, lambda *_: time.sleep(60))
    gone = "its store does not answer (killed, or its machine is gone or cut off)"
    assert own.explain(CLOSED, "closed") == f"lost rank 0: {gone}; rank 1 waited for it in gloo:all_reduce"


@pytest.fixture
def beating(store: Store) -> Iterator[None]:
    """Rank 1 lives."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            store.says(1, beat=time.monotonic_ns())

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    stop.set()
    thread.join()


BEHIND = "lost rank 1: for 6 s in step 7, forward and backward; rank 0 waited for it in "


@pytest.mark.usefixtures("beating")
@pytest.mark.parametrize(("began", "reason"), [(11, f"{BEHIND}gloo:all_reduce, 1 collective(s) ahead"), (12, None)])
def test_a_rank_that_lives_but_is_behind_is_named(
    began: int, reason: str | None, watch: MakeWatch, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.says(1, began=began)
    monkeypatch.setattr(watchdog, "_recorders", lambda: [(lambda *_: b'{"entries": []}', False)])
    own = watch()
    own.note(7, "forward and backward")
    assert own.explain(TIMED_OUT, "timed out") == reason
    assert "entries" in json.loads((tmp_path / "rank_0.json").read_bytes())


def test_what_another_rank_failed_of_is_the_reason_here_too_and_an_own_error_is_told_to_the_others(
    watch: MakeWatch, store: Store
) -> None:
    assert watch().explain(ValueError("a bug"), "ValueError: a bug") is None
    stopped = "stopped by rank 0: ValueError: a bug"
    assert store.records["watch/0"]["leaving"] == stopped
    store.says(1, leaving=stopped.replace("0", "1"))
    assert watch().explain(CLOSED, "closed") == stopped.replace("0", "1")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the watching thread would end the process."""
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    return ended


def test_a_rank_that_computes_on_is_ended_with_the_reason_also_if_its_collective_fails_meanwhile(
    watch: MakeWatch, neighbour: subprocess.Popen[bytes], ended: threading.Event
) -> None:
    reasons: list[str] = []
    reported = threading.Event()

    def report(reason: str) -> None:
        reasons.append(reason)
        reported.wait(20)

    own = watch(on_lost=report)
    time.sleep(0.1)
    assert not reasons
    neighbour.kill()
    try:
        wait_for(lambda: reasons == [KILLED])
        assert own.explain(CLOSED, "closed") == KILLED
    finally:
        reported.set()
    assert ended.wait(20)


@pytest.mark.usefixtures("beating")
def test_a_device_that_waits_for_ever_ends_its_rank_with_the_reason(
    watch: MakeWatch, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    own = watch(on_lost=reasons.append)
    own.timeout_seconds = 0.2
    time.sleep(0.3)
    assert not reasons
    monkeypatch.setattr(watchdog, "_collectives", lambda: {("0", True): (12, 11)})
    assert ended.wait(20)
    assert reasons[0].startswith(BEHIND)


WITH_PENDING_COLLECTIVE = """
import atexit, os, sys, time
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchditan.supervision.exit_status import run_job

def main():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    atexit.register(time.sleep, 60)  # as NCCL's handlers, which wait for the collective
    sys.stdout.write("not flushed yet")
    raise eval(os.environ["RAISES"])

sys.exit(run_job(main))
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [("SystemExit('rank 0: lost rank 1: killed')", 1), ("MemoryError('lost rank 1: killed')", 3)],
)
def test_a_failed_rank_exits_without_waiting_in_exit_handlers(
    error: str, code: int, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    (tmp_path / "script.py").write_text(WITH_PENDING_COLLECTIVE)
    result = run_distributed([tmp_path / "script.py"], None, env={"RAISES": error}, timeout=45)
    assert result.returncode == code
    assert "lost rank 1: killed" in result.stderr
    assert result.stdout == "not flushed yet"


def start_job(folder: Path, *flags: str, **variables: str) -> subprocess.Popen[str]:
    """Two ranks under launch.sh, which never end by themselves unless `flags` say so."""
    always = ["--checkpoint.enable_checkpoint", "--checkpoint.interval=2", f"--job.dump_folder={folder}"]
    return subprocess.Popen(
        [str(SCRIPTS / "launch.sh"), *TINY, *always, "--training.steps=5000", *flags],
        env=environment(folder, NGPU="2", CUDA_VISIBLE_DEVICES="", **variables),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def process_of_rank_1(folder: Path) -> int:
    (status,) = folder.glob("tmp.*/rank-00001.json")
    return int(json.loads(status.read_text())["pid"])


def strike(folder: Path, number: signal.Signals) -> None:
    """Hit rank 1 once its job has trained a few steps."""
    wait_for(lambda: len(read_metrics(folder / "run")) > 4, seconds=240)
    os.kill(process_of_rank_1(folder), number)


@pytest.mark.slow
def test_a_killed_rank_ends_its_job_with_the_reason(tmp_path: Path) -> None:
    job = start_job(tmp_path)
    try:
        strike(tmp_path, signal.SIGKILL)
        code, line = end_of(job)
    finally:
        job.kill()
    assert code == 1
    assert line.startswith("error: rank 0: lost rank 1: ")
    status = read_status(tmp_path / "run")
    assert status is not None
    assert (status["state"], f"error: rank 0: {status['reason']} (exit code 1)") == ("error", line)
    wait_for(lambda: not processes_in(tmp_path))


@pytest.mark.nightly
def test_a_stuck_rank_is_named_within_the_timeout_and_does_not_survive(tmp_path: Path) -> None:
    job = start_job(tmp_path, "--comm.train_timeout_seconds=5")
    try:
        strike(tmp_path, signal.SIGSTOP)
        struck = time.monotonic()
        wait_for(lambda: (read_status(tmp_path / "run") or {})["state"] == "error", seconds=60)
        assert time.monotonic() - struck < 25
        # torchrun gives the stopped rank 30 s to follow SIGTERM.
        errors = job.communicate(timeout=120)[1]
    finally:
        job.kill()
    assert job.returncode == 1
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status["reason"].startswith("lost rank 1: no sign of it for ")
    assert "; rank 0 waited for it in gloo:" in status["reason"]
    assert f"error: rank 0: {status['reason']}" in errors
    assert (tmp_path / "run" / "flight_recorder" / "rank_0.json").exists()
    wait_for(lambda: not processes_in(tmp_path))


@pytest.mark.parametrize(
    ("reason", "is_others"),
    [
        ("RuntimeError: Connection closed by peer", True),
        ("RuntimeError: Timed out waiting 4000ms for recv operation to complete", True),
        ("DistBackendError: NCCL communicator was aborted on rank 0", True),
        ("stopped by rank 1: a bug", True),
        ("ValueError: a bug of the connection", False),
    ],
)
def test_an_error_that_only_says_that_others_went_is_known(reason: str, is_others: bool) -> None:
    assert is_peer_failure(reason) == is_others


@pytest.mark.nightly
def test_with_max_restarts_a_killed_rank_costs_the_steps_since_the_last_checkpoint_alone(
    tmp_path: Path, run_alone: RunAlone
) -> None:
    alone = [*TINY, "--training.steps=30", f"--job.dump_folder={tmp_path / 'alone'}"]
    run_alone(TRAINER, *alone, cwd=tmp_path)
    job = start_job(tmp_path, "--training.steps=30", MAX_RESTARTS="1")
    try:
        strike(tmp_path, signal.SIGKILL)
        errors = job.communicate(timeout=300)[1]
    finally:
        job.kill()
    assert job.returncode == 0, errors
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status["state"] == "completed"
    restarted, expected = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "alone" / "run")
    assert [record["step"] for record in restarted] == list(range(1, 31))
    assert [record["loss"] for record in restarted] == pytest.approx([record["loss"] for record in expected], rel=1e-5)
