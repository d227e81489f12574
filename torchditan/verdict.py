# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""How a run ended: its status, its reason in one line, and the exit code of the process.

Exit codes: 0 done, 2 the user's mistake, 3 out of memory, 75 interrupted and resumable, 1 anything else.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from torchditan.config import ConfigError
from torchditan.run_directory import write_rank_status

# What raises a bare RuntimeError: the CPU allocator, the CUDA driver, cuBLAS's workspace.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
# What oneDNN says when it finds no memory for its own buffers, but not only then.
_PERHAPS_OUT_OF_MEMORY = ("could not create a primitive", "could not create a memory", "could not execute a primitive")


class Verdict(NamedTuple):
    status: str
    exit_code: int
    reason: str


def verdict_of(error: BaseException) -> Verdict:
    """Status, exit code and one-line reason of an exception."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ConfigError):
        return Verdict("error", 2, reason)
    if isinstance(error, KeyboardInterrupt):
        return Verdict("interrupted", 75, "interrupted from the keyboard")
    if _is_out_of_memory(error):
        return Verdict("oom", 3, reason)
    return Verdict("error", 1, f"{type(error).__name__}: {reason}")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    is_limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    texts = _OUT_OF_MEMORY + (_PERHAPS_OUT_OF_MEMORY if is_limited else ())
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def run_job(main: Callable[[], None]) -> int:
    """Run a job and return the exit code of the process; a user's mistake prints one line.

    A launcher that asked for it is told how this rank began and ended, whatever happens.
    """
    write_rank_status("running")
    try:
        main()
    except SystemExit as stop:
        write_rank_status("interrupted" if stop.code else "completed", str(stop.code or "") or None)
        raise
    except (Exception, KeyboardInterrupt) as error:
        verdict = verdict_of(error)
        write_rank_status(verdict.status, verdict.reason, exit_code=verdict.exit_code)
        if verdict.exit_code == 2:
            _report_mistake(verdict.reason)
        elif verdict.exit_code == 75:
            print(verdict.reason, file=sys.stderr)
        else:
            traceback.print_exc()
        return verdict.exit_code
    write_rank_status("completed", exit_code=0)
    return 0


def _report_mistake(reason: str) -> None:
    if int(os.environ.get("RANK", 0)) != 0:
        # Most mistakes are found by every rank. torchrun ends all of them when the first one exits, so the others
        # leave rank 0 the time to say it once; who is still there found something of its own, a corrupt image say.
        time.sleep(5)
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized():
            return  # found before the ranks knew each other: rank 0, perhaps of another machine, says it
    print(f"error: {reason}", file=sys.stderr, flush=True)
