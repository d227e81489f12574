# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""How a process uses the CPU: threads per rank, from affinity, quota and ranks per machine, and freed memory.

Notable:
- physical cores count, not logical CPUs: two hyperthreads share one arithmetic unit;
- a parallel region ends with its last thread, so a thread that waits for a core delays all others. torch respects the
  affinity of the process, but not its cgroup's quota or the other ranks;
- threads split sums, so their number affects the last bits of a result. A resumed run keeps its first number.

This file must not import torch, because `limit_spinning` must run first.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path

_SPIN_COUNT = 3000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def limit_spinning() -> None:
    """Make OpenMP's threads sleep after a short wait for work. Call it before importing torch.

    By default libgomp's threads spin a hundred times as long. On a machine with other jobs, spinning takes CPU time
    from the last thread of the region (measurements: docs/configuration.md). User values of OMP_WAIT_POLICY and
    GOMP_SPINCOUNT take precedence.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))


def configure_cpu(stored: int | None = None) -> None:
    """Set torch's number of threads to this rank's share of the cores, or to a smaller number that its run stored.

    A user's OMP_NUM_THREADS takes precedence. Without a GPU, the process also keeps large freed blocks of memory.
    """
    import torch

    if not torch.cuda.is_available():
        keep_freed_memory()
    if not is_set_by_user():
        share = cores_per_rank()
        torch.set_num_threads(share if stored is None else min(stored, share))


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks, of which every forward pass frees and allocates the same.

    By default glibc returns a freed block of more than 32 MiB. The next allocation maps it again, with a page fault
    for every 4 KiB: a tenth of a float32 step of DiT-S/2, and a sixth of drawing with it (results/cpu_speed.md).
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):  # only glibc has it
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def changed_threads(stored: int | None) -> str | None:
    """A message if this process has another number of threads than its run started with, else None."""
    import torch

    number = torch.get_num_threads()
    if stored in (None, number):
        return None
    why = "OMP_NUM_THREADS" if is_set_by_user() else "fewer cores for each rank"
    return f"{number} CPU threads per rank ({why}), {stored} when the run started: results may differ in the last bits"


def is_set_by_user() -> bool:
    """Whether the user set OMP_NUM_THREADS. torchrun sets it to 1 for two or more ranks, which does not count."""
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        # The environment of torchrun itself: variables that it adds for its ranks are not in it.
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in given.split(b"\0"))


def cores_per_rank() -> int:
    """Cores available to this process, divided by the ranks on this machine; at least 1."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = min(num_cores(cpus), cpu_quota())
    return max(1, int(cores / int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def num_cores(cpus: set[int], topology: Path = _TOPOLOGY) -> int:
    """Number of physical cores of these logical CPUs. If the system does not report them, each CPU counts as one."""
    return len({_siblings(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus})


def _siblings(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def cpu_quota(membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> float:
    """CPU quota of this process's cgroups (versions 1 and 2) in CPUs; infinity without a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        # A container sees its own group as the root, but the path may be the one outside the container.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders = (root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))
        quota = min([quota, *(_quota_of(folder) for folder in folders)])
    return quota


def _quota_of(folder: Path) -> float:
    """Limit of one cgroup: `cpu.max` contains "max 100000" or "150000 100000"; version 1 has two files, -1 for none."""
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit in ("max", "-1") else int(limit) / int(period)
