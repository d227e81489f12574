# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The versions of torch that this package runs on, and what differs between them.

What changed:
- 2.15 has `torch.distributed.set_timeout`, and deprecates `_set_pg_timeout`, the only way in earlier versions.

Notable: `check_torch` runs before anything imports torch, so this file imports it in functions.
"""

from __future__ import annotations

import re
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING

from torchditan.config.errors import option_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_torch() -> None:
    """Refuse a torch outside the range that the metadata of this package names. It reads metadata only.

    A package without metadata (torchditan in a clone that is not installed, torch built in place) is not refused.

    Raises:
        ConfigError: the installed torch is older or newer.
    """
    try:
        requirements, installed = metadata.requires("torchditan") or [], metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    requirement = next((text for text in requirements if re.match(r"torch\s*[<>(]", text)), "")
    if not is_within(installed, requirement):
        tested = ",".join(sorted(re.findall(r"[<>]=?\s*[\d.]+", requirement), reverse=True))
        right = f"must be {tested}: pip install 'torch{tested}'"
        error = option_error("torch", installed, right)
        error.is_of_this_rank = True  # another machine may have another torch
        raise error


def is_within(version: str, requirement: str) -> bool:
    """Whether `2.13.0+cpu` satisfies `torch>=2.11,<2.16`; only major and minor versions count, also of a nightly."""
    found = _major_and_minor(version)
    lower = re.search(r">=\s*([\d.]+)", requirement)
    upper = re.search(r"<\s*([\d.]+)", requirement)
    return not (lower and found < _major_and_minor(lower[1])) and not (upper and found >= _major_and_minor(upper[1]))


def _major_and_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set how long ranks wait for each other in later collectives of a process group."""
    import torch.distributed as dist

    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
