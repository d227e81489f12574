# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Status files that each rank writes for the launcher, which determines the outcome of the job from them."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from torchditan.run.atomic_files import write_file
from torchditan.run.directory import STATES, to_json

RANKS_VARIABLE = "TORCHDITAN_RANKS_FOLDER"


def write_rank_status(state: str, reason: str | None = None, **extra: Any) -> None:
    """Write `rank-00003.json`, by local rank, into the folder that the launcher of this machine named. Does nothing if
    no launcher asks for it.

    Keys of earlier calls are kept unless this call changes them. Once a rank has ended, its first status is kept.
    """
    assert state in STATES, state
    folder = os.environ.get(RANKS_VARIABLE)
    if not folder:
        return
    rank = int(os.environ.get("RANK", 0))
    # When torchrun restarts the ranks on other machines, the global rank of this process may change.
    path = Path(folder) / f"rank-{int(os.environ.get('LOCAL_RANK', rank)):05d}.json"
    earlier = _read_rank_status(path) or {}
    if earlier.get("pid") != os.getpid():
        earlier = {}  # from another attempt
    if earlier.get("state", "running") != "running":
        return
    own = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
    status = {"state": state, "reason": reason, "time": time.time(), **extra}
    write_file(path, to_json({"step": None, **earlier, **own, **status}, indent=2))


def read_rank_statuses(folder: str | Path) -> list[dict[str, Any]]:
    """The statuses that ranks wrote with `write_rank_status`, by rank; ranks without a file are absent."""
    found = (_read_rank_status(path) for path in sorted(Path(folder).glob("rank-*.json")))
    return [status for status in found if status is not None]


def _read_rank_status(path: Path) -> dict[str, Any] | None:
    try:
        status: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return status
