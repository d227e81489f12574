# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Runs scripts in processes that are forks of one that has imported torch and the trainer.

torchrun starts a new Python for each rank, whose imports take longer than twenty steps of a tiny model. Here its agent
forks the ranks instead. They have the same environment variables, and a rank that fails ends the others.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

_IMPORTED = [
    "torch._dynamo",  # the first step of an optimizer imports it
    "torch.distributed.launcher.api",
    "torchditan.datasets.digits",
    "torchditan.diffusion.flow_matching",
    "torchditan.job.prepare",
    "torchditan.trainer",
]


def start_server() -> None:
    """Start the process that is forked by `run_forked`, and by `torch.multiprocessing` with "forkserver"."""
    multiprocessing.set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()


def run_forked(
    arguments: list[str], world_size: int | None, *, env: dict[str, str], cwd: Path, output: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a script on ranks, or with `world_size` None without torchrun. `output` is a folder for what it prints."""
    files = [output / "stdout", output / "stderr"]
    for file in files:
        file.touch()
    process = multiprocessing.get_context("forkserver").Process(
        target=launch, args=(arguments, world_size, env, cwd, files)
    )
    process.start()
    try:
        process.join(timeout)
    finally:  # it is still alive after the timeout, and when pytest is interrupted
        if is_late := process.is_alive():
            process.terminate()  # the agent ends its ranks
            process.join(60)
            process.kill()
    stdout, stderr = (file.read_text() for file in files)
    if is_late:
        pytest.fail(f"{arguments} took longer than {timeout} s\n{stdout}\n{stderr}")
    assert process.exitcode is not None
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


def launch(arguments: list[str], world_size: int | None, env: dict[str, str], cwd: Path, files: list[Path]) -> None:
    """Run a script in this process, a fork, with or without torchrun's agent. `files` take stdout and stderr."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # A fork of this server would start loader workers from another server, which survives a SIGKILL of the rank.
    multiprocessing.set_start_method(None, force=True)
    if world_size is None:
        _run_script(arguments)
        return
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id="none",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, _run_rank)(arguments)


def _run_rank(arguments: list[str]) -> None:
    # The agent's handlers raise. If it ended this rank while the rank exits, its traceback would follow the reason.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run_script(arguments)


def _run_script(arguments: list[str]) -> None:
    sys.argv = arguments
    try:
        if arguments[0] == "torchditan":
            runpy.run_module("torchditan", run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise  # the agent expects that a rank which succeeds returns
