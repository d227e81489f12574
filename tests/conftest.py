# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Shared by all tests: one thread per process, GPU tests skipped without a GPU, and gloo ranks on request."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

# Set before torch is imported: ranks of a multi-process test share few cores.
os.environ["OMP_NUM_THREADS"] = "1"

REPOSITORY = Path(__file__).resolve().parent.parent

# Tests of ranks and precision compare CPU runs, also on a machine with a GPU; tests/test_gpu.py is for that.
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}

RunDistributed = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def run_distributed() -> RunDistributed:
    """`run_distributed(["train.py", "--training.steps", "2"], world_size=2)`: a script on gloo ranks.

    Returns the finished process with its output as text; the caller looks at `returncode`. A relative script
    is one of the repository.
    """

    def run(
        script_args: Sequence[str | Path],
        world_size: int,
        *,
        timeout: float = 180.0,
        cwd: Path = REPOSITORY,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world_size}"]
        command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
        command += [str(REPOSITORY / script_args[0]), *map(str, script_args[1:])]
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **WITHOUT_GPU, "PYTHONPATH": path, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # SIGTERM, which torchrun passes on: ranks are sessions of their own and would outlive a SIGKILL.
            process.terminate()
            stdout, stderr = process.communicate(timeout=60)
            pytest.fail(f"{command} took longer than {timeout} s\n{stdout}\n{stderr}")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return run
