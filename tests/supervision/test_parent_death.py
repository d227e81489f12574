# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A process exits with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
