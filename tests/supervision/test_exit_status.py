# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Commands that only print end quietly when their reader closes the pipe; a run leaves no thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_closed_pipe_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    reading, writing = os.pipe()
    os.close(reading)  # the reader is gone before the first line
    try:
        run = subprocess.run(
            [sys.executable, "-m", "torchditan", "list"],
            cwd=tmp_path,
            env=environment,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    finally:
        os.close(writing)
    assert "Traceback" not in run.stderr
    assert "BrokenPipe" not in run.stderr
    assert run.returncode == 0


@pytest.mark.parametrize("command", ["train", "generate", "train quickstart --job.dump_folder"])
def test_a_name_too_long_for_the_file_system_is_one_line(command: str, run_script: RunScript) -> None:
    code, _, errors = run_script("torchditan", *command.split(), "a" * 300)
    assert code == 2
    assert errors == f"error: {'a' * 97}... is too long for the name of a file\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_no_thread_of_a_process_group_outlives_a_run_that_failed(tmp_path: Path) -> None:
    """One that asks for the GIL while the interpreter shuts down would abort the process after the run."""
    code = (
        "import atexit, pathlib, runpy\n"
        "import torchditan.trainer; torchditan.trainer.Trainer.train_step = None\n"
        "names = lambda: [path.read_text().strip() for path in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "atexit.register(lambda: print('threads:', *sorted(names())))\n"
        f"runpy.run_path({str(REPOSITORY / 'train.py')!r}, run_name='__main__')\n"
    )
    flags = ["--model.flavor=debugmodel", "--training.steps=1", "--training.global_batch_size=2"]
    flags += ["--metrics.enable_sampling=false", "--validation.freq=0", f"--job.dump_folder={tmp_path}"]
    command = [sys.executable, "-c", code, "--job.config_file=quickstart", *flags]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    threads = run.stdout.split("threads:")[1]
    assert "gloo" not in threads, threads
