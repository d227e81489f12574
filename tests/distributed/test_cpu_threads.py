# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The number of CPU threads: from affinity, quota and ranks of the machine; kept by a resume. Freed memory."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_runs import KEEP

from torchditan.distributed import cpu_threads
from torchditan.distributed.cpu_threads import cores_per_rank, cpu_quota, num_cores
from torchditan.run.reading import read_config

if TYPE_CHECKING:
    from tests.conftest import Train


def write(root: Path, **files: str) -> None:
    """`write(root, **{"group/cpu.max": "max 100000"})`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def quota_of(root: Path, membership: str, **files: str) -> float:
    write(root, membership=membership, **{f"cgroup/{name}": text for name, text in files.items()})
    return cpu_quota(root / "membership", root / "cgroup")


V1 = "cpu.cfs_{}_us".format
V1_GROUP = {f"cpu,cpuacct/{V1('quota')}": "-1", f"cpu,cpuacct/{V1('period')}": "100000"}


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {}, math.inf),
        ("0::/slice/job", {"slice/cpu.max": "400000 100000", "slice/job/cpu.max": "150000 50000"}, 3),
        ("0::/docker/outside", {"cpu.max": "200000 100000"}, 2),  # a container sees its own group as the root
        ("0::/", {"cpu.max": "torn"}, math.inf),
        (
            "3:cpu,cpuacct:/job",
            {**V1_GROUP, f"cpu,cpuacct/job/{V1('quota')}": "300000", f"cpu,cpuacct/job/{V1('period')}": "100000"},
            3,
        ),
    ],
)
def test_the_quota_is_the_tightest_of_the_cgroups(
    membership: str, files: dict[str, str], expected: float, tmp_path: Path
) -> None:
    assert quota_of(tmp_path, membership, **files) == expected


def test_two_hyperthreads_are_one_core(tmp_path: Path) -> None:
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    write(tmp_path, **{f"cpu{cpu}/topology/thread_siblings_list": text for cpu, text in siblings.items()})
    assert num_cores({0, 1, 4, 5}, tmp_path) == 2
    assert num_cores({0, 4}, tmp_path) == 1
    assert num_cores({7, 8, 9}, tmp_path) == 3  # the system does not say


@pytest.mark.parametrize(
    ("cores", "quota", "ranks", "expected"),
    [(8, math.inf, 2, 4), (8, 2.5, 1, 2), (8, 0.5, 1, 1)],
)
def test_ranks_share_the_cores_that_affinity_and_quota_leave(
    cores: int, quota: float, ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "num_cores", lambda cpus: cores)
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: quota)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert cores_per_rank() == expected


LAUNCHER = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
os.environ["TORCHELASTIC_RUN_ID"] = "none"
code = "from torchditan.distributed.cpu_threads import *; print(is_set_by_user())"
subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("given", "expected"), [({"OMP_NUM_THREADS": "1"}, "True"), ({}, "False")])
def test_what_torchrun_sets_is_not_the_users(given: dict[str, str], expected: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**kept, **given, "PYTHONPATH": path}
    command = [sys.executable, "-c", LAUNCHER]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected


def test_threads_spin_shortly_unless_the_user_says_how_they_wait() -> None:
    code = textwrap.dedent("""
        import os, sys
        sys.modules["torch"] = None  # libgomp reads the variable when torch is imported
        try:
            from torchditan import load
        except ImportError:
            print(os.environ.get("GOMP_SPINCOUNT"))
    """)
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}

    def shown(**given: str) -> str:
        path = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, env={**kept, **path, **given}, capture_output=True, text=True, check=True)
        return result.stdout.strip()

    assert shown() == "3000"
    assert shown(GOMP_SPINCOUNT="7") == "7"
    assert shown(OMP_WAIT_POLICY="active") == "None"


@pytest.fixture
def free_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """OMP_NUM_THREADS is not set; torch's number is put back afterwards."""
    number = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    yield monkeypatch
    torch.set_num_threads(number)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can keep large freed blocks")
def test_a_large_block_that_was_freed_is_used_again() -> None:
    code = textwrap.dedent("""
        import resource, torch
        from torchditan.distributed.cpu_threads import configure_cpu
        configure_cpu()
        def faults(blocks):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(blocks):
                torch.ones(2**24)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults(20) > 2**14  # the pages of 64 MiB
        assert faults(20) < 2**8
    """)
    path = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **path, "CUDA_VISIBLE_DEVICES": ""}, check=True)


def test_a_resume_keeps_the_number_of_its_run(free_threads: pytest.MonkeyPatch, train: Train, tmp_path: Path) -> None:
    def trained(steps: int, cores: int) -> str:
        free_threads.setattr(cpu_threads, "cores_per_rank", lambda: cores)
        return train("run", *KEEP, f"--training.steps={steps}").out

    def recorded() -> int:
        return read_config(tmp_path / "run")["hardware"]["cpu_threads"]

    trained(1, cores=3)
    assert recorded() == torch.get_num_threads() == 3
    fewer = trained(2, cores=2)
    assert torch.get_num_threads() == 2 and recorded() == 3
    assert "2 CPU threads per rank (fewer cores for each rank), 3 when the run started" in fewer
    again = trained(3, cores=5)
    assert torch.get_num_threads() == recorded() == 3
    assert "CPU threads" not in again
