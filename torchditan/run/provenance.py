# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Provenance of a result: versions, git commit, hardware. Runs and benchmarks record it together with their numbers.

Notable: torch is imported only where it is needed, so that reading a run does not require it.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torchditan


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of Python and of `packages`; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            # The metadata of an editable installation is as old as its `pip install`.
            found[package] = torchditan.__version__ if package == "torchditan" else metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit() -> str | None:
    """Commit of the clone that this package runs from, with `-dirty` if files differ from it; None without git."""
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def git_user() -> str | None:
    """Name of the author of new commits in the clone; None without git or a name."""
    return _git("config", "user.name")


def checkout() -> Path | None:
    """The folder of the checkout that this package runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "train.py").exists() and (root / "pyproject.toml").exists() else None


def importable() -> dict[str, str]:
    """The environment of this process, in which a checkout that is not installed is importable from any folder."""
    if (root := checkout()) is None:
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


def _git(*arguments: str) -> str | None:
    root = checkout()
    if root is None or not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def hardware(device: str, device_count: int) -> dict[str, Any]:
    """The machine of this process, and the number of devices like `device` that the run uses on all machines."""
    import torch

    return {
        "device": device.split(":")[0],
        "device_name": device_name(device),
        "device_count": device_count,
        "hostname": socket.gethostname(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),  # per rank
    }


def device_name(device: str) -> str:
    """The vendor's name of the GPU or the CPU."""
    import torch

    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
