# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""scripts/launch.sh and slurm.sh: signals reach the ranks, exit codes report their status, and SLURM requeues the job.

Most tests run a fake of torchrun and its ranks that starts without torch; the tests of two nodes are real.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from refusals import assert_refused

from torchditan.run.reading import read_metrics, read_status
from torchditan.supervision.exit_status import Verdict, judge_ranks
from torchditan.supervision.rank_status import RANKS_VARIABLE, read_rank_statuses, write_rank_status

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TRAINER = Path(__file__).resolve().parents[2] / "train.py"
OURS = (
    *("NGPU", "NNODES", "NODE_RANK", "CONFIG_FILE", "LOG_RANK", "MAX_RESTARTS", "MASTER_ADDR", "MASTER_PORT"),
    *("RDZV_CONF", "REQUEUE"),
)

# As torchrun does: ranks are sessions of their own, SIGTERM is passed on, the first failure ends the others.
TORCHRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
num_ranks = next(int(word.split("=")[1]) for word in sys.argv if word.startswith("--nproc_per_node"))
ranks = []
def end(number, frame):
    for rank in ranks:
        rank.terminate()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
open("torchrun.log", "w").write("\\n".join([*sys.argv, os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")]))
open("torchrun.pid", "w").write(str(os.getpid()))
time.sleep(float(os.environ.get("RANKS_START_AFTER", 0)))
for rank in range(num_ranks):
    command = [sys.executable, "rank.py"]
    ranks.append(subprocess.Popen(command, env={{**os.environ, "RANK": str(rank)}}, start_new_session=True))
while True:
    codes = [rank.poll() for rank in ranks]
    if any(codes):
        end(None, None)
    if None not in codes:
        sys.exit(0)
    time.sleep(0.02)
"""

# What a rank does when it is ready, by the variable RANKS; "stop" saves when it is asked to.
RANK = """
import os, signal, sys, time
from torchditan.supervision.rank_status import write_rank_status
does, rank = os.environ["RANKS"], int(os.environ["RANK"])
write_rank_status("running")
signals = []
for number in {"deaf": (), "stop": (signal.SIGUSR1, signal.SIGTERM)}.get(does, (signal.SIGUSR1,)):
    signal.signal(number, lambda number, frame: signals.append(signal.Signals(number).name))
open(f"ready-{rank}", "w").close()
if does == "complete":
    write_rank_status("completed")
elif does == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
elif does in ("oom", "error", "mistake") and rank == 1:
    code = {"oom": 3, "error": 1, "mistake": 2}[does]
    write_rank_status("oom" if does == "oom" else "error", f"{does} of rank 1", exit_code=code)
    sys.exit(code)
elif does == "stop":
    while not signals:
        time.sleep(0.02)
    time.sleep(0.3)
    open(f"signals-{rank}", "w").write(" ".join(signals))
    write_rank_status("interrupted", "stopped after step 5")
else:
    time.sleep(60)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("--training.steps=3", NGPU="2")`: launch.sh with stand-ins for torchrun and scontrol, in `tmp_path`."""
    executable(tmp_path / "bin" / "torchrun", TORCHRUN)
    executable(tmp_path / "bin" / "scontrol", '#!/bin/sh\necho "$@" >> scontrol.log\nexit ${SCONTROL_CODE:-0}\n')
    (tmp_path / "rank.py").write_text(RANK)
    started = []

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(SCRIPTS / "launch.sh"), *arguments],
            cwd=tmp_path,
            env=environment(tmp_path, **{"NGPU": "2", **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
    for pid in processes_in(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Without what this machine or SLURM may have set; temporary folders are made in `folder`."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS and not name.startswith("SLURM_")}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(SCRIPTS.parent), "TMPDIR": str(folder), **variables}


def processes_in(folder: Path) -> list[int]:
    """Processes that work in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "cwd").readlink() == folder.resolve():
                found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], Any], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit code, last line on stderr)."""
    errors = process.communicate(timeout=120)[1]
    return process.returncode, errors.splitlines()[-1] if errors else ""


@pytest.mark.parametrize(
    ("ranks", "code", "line"),
    [
        ("complete", 0, "completed: 2 rank(s) (exit code 0)"),
        ("mistake", 2, "error: mistake of rank 1"),
        ("oom", 3, "oom: rank 1: oom of rank 1 (exit code 3)"),
        ("kill", 1, "error: 2 of 2 rank(s) exited without an error message, as if killed by the system (exit code 1)"),
    ],
)
def test_the_exit_code_is_what_the_ranks_earned_and_requeues_nothing(
    ranks: str, code: int, line: str, start: Start, tmp_path: Path
) -> None:
    assert end_of(start(RANKS=ranks, SLURM_JOB_ID="17")) == (code, line)
    assert not list(tmp_path.glob("tmp.*"))
    assert not (tmp_path / "scontrol.log").exists()


SECOND_NODE = {"NNODES": "2", "MASTER_ADDR": "localhost", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("name", "variables", "calls"),
    [
        ("SIGTERM", {}, "requeue 17\n"),
        ("SIGUSR1", {"SCONTROL_CODE": "1"}, "requeue 17\n"),
        ("SIGINT", {"REQUEUE": "0"}, ""),
        ("SIGUSR1", SECOND_NODE, ""),
    ],
)
def test_a_signal_reaches_every_rank_once_and_the_first_node_requeues_the_interrupted_job(
    name: str, variables: dict[str, str], calls: str, start: Start, tmp_path: Path
) -> None:
    process = start(RANKS="stop", SLURM_JOB_ID="17", **variables)
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    torchrun = int((tmp_path / "torchrun.pid").read_text())
    os.kill(torchrun, signal.SIGUSR1)  # SLURM sends it to every process of a step; it ends nothing
    process.send_signal(signal.Signals[name])
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 75
    assert "interrupted: rank 0: stopped after step 5 (exit code 75)\n" in errors
    assert [(tmp_path / f"signals-{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1", "SIGUSR1"]
    assert errors.endswith("submit it again to continue\n") == ("SCONTROL_CODE" in variables)
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == calls


@pytest.mark.parametrize("phase", [{"RANKS": "stop", "RANKS_START_AFTER": "60"}, {"RANKS": "deaf"}])
def test_a_signal_before_any_rank_listens_is_not_lost(phase: dict[str, str], start: Start, tmp_path: Path) -> None:
    process = start(**phase)
    wait_for((tmp_path / ("torchrun.pid" if "RANKS_START_AFTER" in phase else "ready-1")).exists)
    process.send_signal(signal.SIGUSR1)
    code, line = end_of(process)
    assert (code, line.split(":")[0]) == (75, "interrupted")
    wait_for(lambda: not processes_in(tmp_path))


def test_a_second_signal_ends_everything_at_once(start: Start, tmp_path: Path) -> None:
    process = start(RANKS="wait")
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # the same request still
    time.sleep(2.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert end_of(process)[0] == 75
    wait_for(lambda: not processes_in(tmp_path))


@pytest.mark.parametrize(
    ("variables", "about", "mentions"),
    [
        ({"NGPU": "two"}, 'NGPU = "two"', ["1", "integer"]),
        ({"NNODES": "0"}, 'NNODES = "0"', ["1", "integer"]),
        ({"NNODES": "2:1"}, 'NNODES = "2:1"', ["1:2"]),
        ({"NNODES": "2"}, "MASTER_ADDR = none", ["NNODES"]),
        ({"NNODES": "1:2"}, "MASTER_ADDR = none", ["NNODES"]),
        (
            {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"},
            'NODE_RANK = "2"',
            ["0", "1"],
        ),
    ],
)
def test_variables_that_cannot_be_are_refused_in_one_line(
    variables: dict[str, str], about: str, mentions: list[str], start: Start
) -> None:
    process = start(**variables)
    assert_refused(process.communicate()[1], about, mentions)
    assert process.returncode == 2


def test_an_environment_without_torch_is_refused_in_one_line(start: Start, tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    (tmp_path / "bin" / "torchrun").unlink()
    process = start(PATH=str(tmp_path / "bin"))
    assert_refused(process.communicate()[1], "torchrun", ["environment"])
    assert process.returncode == 2


def test_several_machines_meet_by_address_and_may_be_a_range(start: Start, tmp_path: Path) -> None:
    machines = {"NNODES": "1:2", "NODE_RANK": "1", "MASTER_ADDR": "first", "RDZV_CONF": "join_timeout=9"}
    assert end_of(start(RANKS="complete", **machines))[0] == 0
    words = (tmp_path / "torchrun.log").read_text().splitlines()
    assert {"--nnodes=1:2", "--rdzv_endpoint=first:29500", "--rdzv_conf=is_host=0,join_timeout=9"} <= set(words)
    assert words[-1] == "1"  # otherwise a machine that joins later never learns the address of rank 0


def test_a_rank_that_restarts_under_another_number_replaces_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "1")
    write_rank_status("running")
    monkeypatch.setenv("RANK", "0")
    write_rank_status("completed")
    assert [(status["rank"], status["state"]) for status in read_rank_statuses(tmp_path)] == [(0, "completed")]


def test_the_slurm_script_launches_on_every_node_and_passes_its_arguments_on(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "scontrol", "#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    executable(tmp_path / "bin" / "srun", '#!/bin/sh\nprintf "%s\\n" "$MASTER_ADDR:$MASTER_PORT" "$NGPU" "$@"\n')
    slurm = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"}
    slurm["SLURM_CPUS_PER_TASK"] = "64"
    result = subprocess.run(
        [str(SCRIPTS / "slurm.sh"), "--job.description", "two words"],
        env=environment(tmp_path, SLURM_SUBMIT_DIR=str(SCRIPTS.parent), **slurm),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert lines[:4] == ["n1:23456", "8", "--cpus-per-task=64", "--ntasks=2"]
    assert lines[-3:] == [str(SCRIPTS / "launch.sh"), "--job.description", "two words"]


def test_the_slurm_script_says_where_it_must_be_submitted(tmp_path: Path) -> None:
    variables = environment(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path))
    result = subprocess.run([str(SCRIPTS / "slurm.sh")], env=variables, capture_output=True, text=True)
    right = "has no scripts/launch.sh; must be the folder of TorchDiTan"
    assert (result.returncode, result.stderr) == (2, f'error: REPOSITORY = "{tmp_path}": {right}\n')


def rank(number: int, state: str, reason: str | None = None, *, at: float = 0.0, code: int = 1) -> dict[str, Any]:
    return {"rank": number, "state": state, "reason": reason, "time": at, "exit_code": code}


LOST = "lost rank 1: killed by SIGKILL, last seen in step 7, forward and backward"
STOPPED = "stopped by rank 2: full"
CLOSED = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("ranks", "was_signalled", "verdict"),
    [
        ([rank(0, "completed"), rank(1, "completed")], True, ("completed", 0, "2 rank(s)")),
        ([rank(0, "interrupted", "step 7"), rank(1, "running")], False, ("interrupted", 75, "rank 0: step 7")),
        ([rank(0, "interrupted", "step 7"), rank(1, "error", "bug")], True, ("error", 1, "rank 1: bug")),
        ([rank(0, "error", CLOSED), rank(1, "oom", "full", at=9)], True, ("oom", 3, "rank 1: full")),
        ([rank(0, "error", CLOSED), rank(1, "error", "bug", at=9)], False, ("error", 1, "rank 1: bug")),
        ([rank(0, "error", CLOSED), rank(1, "error", "no file", at=9, code=2)], False, ("error", 2, "no file")),
        ([rank(0, "error", LOST, at=9), rank(2, "error", CLOSED)], False, ("error", 1, f"rank 0: {LOST}")),
        ([rank(0, "error", STOPPED), rank(1, "running")], False, ("error", 1, f"rank 0: {STOPPED}")),
    ],
)
def test_the_verdict_names_the_rank_that_failed_by_itself(
    ranks: list[dict[str, Any]], was_signalled: bool, verdict: tuple[str, int, str]
) -> None:
    assert judge_ranks(ranks, num_ranks=2, was_signalled=was_signalled) == Verdict(*verdict)


@pytest.mark.parametrize(
    "ranks", [[], [rank(0, "running"), rank(1, "running")], [rank(0, "error", LOST), rank(1, "running")]]
)
def test_ranks_that_a_signal_ended_before_they_saved_are_resumable(ranks: list[dict[str, Any]]) -> None:
    assert judge_ranks(ranks, num_ranks=2, was_signalled=True).exit_code == 75
    assert judge_ranks(ranks, num_ranks=2).exit_code == 1


TINY = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.global_batch_size=12"]
TINY += ["--training.mixed_precision_param=float32", "--metrics.enable_sampling=false", "--metrics.log_freq=1"]
TINY += ["--metrics.experiment_name=run"]


def start_node(number: int, port: int, folder: Path, *flags: str) -> subprocess.Popen[str]:
    meeting = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    variables = environment(folder, NGPU="1", CUDA_VISIBLE_DEVICES="", **meeting)
    command = [str(SCRIPTS / "launch.sh"), *TINY, f"--job.dump_folder={folder}", *flags]
    return subprocess.Popen(
        command, env=variables, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
    return port


@pytest.mark.nightly
def test_two_nodes_train_as_one_process_and_a_signal_to_one_interrupts_both(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--checkpoint.enable_checkpoint", "--training.steps=2000", "--checkpoint.interval=2000")
    nodes = [start_node(number, port, tmp_path, *flags) for number in (0, 1)]
    try:
        wait_for(lambda: len(read_metrics(tmp_path / "run")) > 4, seconds=240)
        nodes[1].send_signal(signal.SIGUSR1)
        ends = [node.communicate(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [75, 75], ends
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status["state"] == "interrupted"

    together = read_metrics(tmp_path / "run")
    alone = [*TINY, "--training.steps=5", f"--job.dump_folder={tmp_path / 'alone'}"]
    subprocess.run([sys.executable, str(TRAINER), *alone], check=True, capture_output=True)
    for here, there in zip(read_metrics(tmp_path / "alone" / "run"), together[:5], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5), here["step"]
