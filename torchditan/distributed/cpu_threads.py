# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""How many CPU threads a rank computes with: from affinity, quota and ranks per machine, never from the load.

Notable:
- cores count, not logical CPUs: two hyperthreads share one unit that multiplies;
- a parallel region ends with its last thread, so threads that wait for a core hold up all others. torch knows the
  affinity of the process, but neither its cgroup's quota nor the other ranks;
- sums are split by thread, so the number decides the last bits of a result. A resumed run keeps its first number.

Imports no torch: `limit_spinning` has to come before it.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from torchditan.config.errors import option_error
from torchditan.run.reading import read_config

_SPIN_COUNT = 3000
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def check_user_threads() -> None:
    """Refuse an OMP_NUM_THREADS that OpenMP would ignore. Call it before torch is imported.

    Raises:
        ConfigError: it is not a positive integer, or a list of them (one for each level of nesting).
    """
    given = os.environ.get("OMP_NUM_THREADS")
    if given is not None and not re.fullmatch(r"\s*0*[1-9]\d*\s*(,\s*0*[1-9]\d*\s*)*", given):
        right = "must be an integer of at least 1; leave it out to use this process's share of the cores"
        raise option_error("OMP_NUM_THREADS", given, right)


def limit_spinning() -> None:
    """Have OpenMP's threads sleep after a short wait for work. Call it before torch is imported.

    By default libgomp's threads spin a hundred times as long. On a machine with other jobs they use up the time
    that the last thread of the region waits for (measurements: docs/configuration.md). OMP_WAIT_POLICY and
    GOMP_SPINCOUNT of the user stay as they are.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))


def set_cpu_threads(run: Path | None = None) -> str | None:
    """Give torch this rank's share of the cores, or the number that the run in folder `run` began with.

    An OMP_NUM_THREADS of the user stays as it is.

    Returns:
        A line that says why a run continues with another number than it started with; None where it does not.
    """
    import torch

    stored = None if run is None else stored_cpu_threads(run)
    is_users = is_set_by_user()
    if not is_users:
        share = cores_per_rank()
        torch.set_num_threads(share if stored is None else min(stored, share))
    number = torch.get_num_threads()
    if stored in (None, number):
        return None
    why = "OMP_NUM_THREADS" if is_users else "fewer cores for each rank"
    return f"{number} CPU threads per rank ({why}), {stored} when the run began: results may differ in the last bits"


def stored_cpu_threads(run: Path) -> int | None:
    """The number in the config.json of a run, None without one: runs of earlier versions did not record it."""
    if not (run / "config.json").exists():
        return None
    number = read_config(run).get("hardware", {}).get("cpu_threads")
    return number if isinstance(number, int) and number > 0 else None


def is_set_by_user() -> bool:
    """Whether OMP_NUM_THREADS is set, and not by torchrun, which sets 1 for two ranks or more."""
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        # As torchrun was started: what it adds for its ranks does not show here.
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in given.split(b"\0"))


def cores_per_rank() -> int:
    """Cores that this process may use, shared by the ranks of this machine; at least 1."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = min(num_cores(cpus), cpu_quota())
    return max(1, int(cores / int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def num_cores(cpus: set[int], topology: Path = _TOPOLOGY) -> int:
    """Physical cores that these logical CPUs belong to; where the system does not say, each is one."""
    return len({_siblings(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus})


def _siblings(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def cpu_quota(membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> float:
    """CPUs' worth of time that the cgroups of this process allow (versions 1 and 2), infinity without a limit."""
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
        # A container sees its own group as the root, while the path may be the one outside.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders = (root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))
        quota = min([quota, *(_quota_of(folder) for folder in folders)])
    return quota


def _quota_of(folder: Path) -> float:
    """The limit of one cgroup: `cpu.max` holds "max 100000" or "150000 100000", version 1 two files, -1 for none."""
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit in ("max", "-1") else int(limit) / int(period)
