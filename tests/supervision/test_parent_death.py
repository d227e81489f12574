# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A process exits with its parent. A rank also notices if its launcher exited before the rank could ask for this."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchditan.supervision import parent_death

REPOSITORY = Path(__file__).resolve().parents[2]
PARENT = """
import subprocess, sys, time
code = "import sys; sys.path.insert(0, {repository!r}); from torchditan.supervision.exit_status import run_job; "
code += "import time; "
code += "run_job(lambda: (print('begun', flush=True), time.sleep(60)))"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_rank_ends_with_its_launcher_before_it_imports_torch() -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}
    command = [sys.executable, "-c", PARENT.format(repository=str(REPOSITORY))]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "begun\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and is_alive(child):
        time.sleep(0.05)
    assert not is_alive(child)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_launcher_whose_store_does_not_answer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent_death, "_PROBE_S", 0.1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        parent_death.check_launcher()
    with pytest.raises(RuntimeError, match=rf"torchrun is gone: its store at localhost:{port} does not answer"):
        parent_death.check_launcher()
