# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""How a run ended: its status, a reason of one line, and the exit code of the process.

Exit codes: 0 done, 2 a mistake of the user, 3 out of memory, 75 interrupted and resumable, 1 anything else.

torchrun always exits with 1 if a rank fails, so scripts/launch.sh determines the code with this command:

    python -m torchditan.supervision.exit_status FOLDER --num_ranks 8

It reads what the ranks wrote into the folder, prints one line on how they ended, and exits with the matching code.
Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import errno
import gc
import io
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from torchditan.distributed.cpu_threads import limit_spinning
from torchditan.errors import ConfigError, shorten
from torchditan.supervision.parent_death import die_with_launcher
from torchditan.supervision.rank_status import RANKS_VARIABLE, read_rank_statuses, write_rank_status

LOST_RANK = "lost rank"
"""Start of the reason that a rank reports when another one was killed or is stuck (watchdog.py)."""
STOPPED_BY = "stopped by rank"
"""Start of its reason when another one failed by itself."""
# Errors that a rank sees when others are gone. Only the others know the cause.
_OTHERS_WENT = re.compile(
    rf"^{LOST_RANK} |^{STOPPED_BY} |"
    r"Connection (closed|reset|refused)|Broken pipe|NCCL|remote process|recvValue|heartbeat|Timed out waiting"
)
# Messages of a bare RuntimeError: from the CPU allocator, the CUDA driver, cuBLAS's workspace.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
# Messages of oneDNN when it finds no memory for its buffers. They may have other causes.
_PERHAPS_OUT_OF_MEMORY = ("could not create a primitive", "could not create a memory", "could not execute a primitive")


class Interrupted(Exception):
    """All ranks stopped after the same step on request; the message contains the step and how to continue."""


class OutOfMemory(MemoryError):
    """No memory left, where one line says enough: it contains what is kept and how to continue."""


class NotSaved(OSError):
    """The disk did not take the end of a run, where one line says enough: it contains what is kept."""


class Verdict(NamedTuple):
    status: str
    exit_code: int
    reason: str


def verdict_of(error: BaseException) -> Verdict:
    """Status, exit code and one-line reason of an exception."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ConfigError):
        return Verdict("error", 2, reason)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG and error.filename is not None:
        name = shorten(os.fsdecode(error.filename), most=100)
        return Verdict("error", 2, str(ConfigError(f"{name} is too long for the name of a file")))
    if isinstance(error, Interrupted):
        return Verdict("interrupted", 75, reason)
    if isinstance(error, KeyboardInterrupt):
        return Verdict("interrupted", 75, "interrupted from the keyboard")
    if is_out_of_memory(error):
        return Verdict("oom", 3, reason)
    return Verdict("error", 1, reason if isinstance(error, NotSaved) else f"{type(error).__name__}: {reason}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    is_limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    texts = _OUT_OF_MEMORY + (_PERHAPS_OUT_OF_MEMORY if is_limited else ())
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def is_peer_failure(reason: str) -> bool:
    """Whether an error only reports that other ranks are gone or do not answer."""
    return _OTHERS_WENT.search(reason) is not None


def run_job(main: Callable[[], None]) -> int:
    """Run a job and return the exit code of the process; a mistake of the user prints one line.

    If the launcher asks for it, this rank always reports how it started and ended. A rank that fails while its
    process group is open exits here, without exit handlers.
    """
    die_with_launcher()
    limit_spinning()
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a locale without UTF-8, escape characters as stderr already does
        sys.stdout.reconfigure(errors="backslashreplace")
    write_rank_status("running")
    try:
        main()
        write_rank_status("completed", exit_code=0)
        return 0
    except SystemExit as stop:
        state = "interrupted" if stop.code == 75 else "error" if stop.code else "completed"
        write_rank_status(state, str(stop.code or "") or None)
        if stop.code and _may_wait_for_others():
            if not isinstance(stop.code, int):
                print(stop.code, file=sys.stderr)
            exit_at_once(stop.code if isinstance(stop.code, int) else 1)
        raise
    except (Exception, KeyboardInterrupt) as error:
        verdict = verdict_of(error)
        write_rank_status(verdict.status, verdict.reason, exit_code=verdict.exit_code)
        _print(error, verdict)
        if isinstance(error, Interrupted) and "TORCHELASTIC_RUN_ID" in os.environ:
            return 0  # torchrun restarts failed ranks; scripts/launch.sh exits with 75
        if _may_wait_for_others():
            exit_at_once(verdict.exit_code)
        return verdict.exit_code
    finally:
        if _has_process_group():  # after an error in one process; torch would warn on CUDA
            with suppress(RuntimeError):  # of NCCL, once more, if the device has failed
                sys.modules["torch.distributed"].destroy_process_group()
        # Process groups that a cycle keeps alive would end while the interpreter shuts down. A thread of theirs that
        # then asks for the GIL aborts the process (https://github.com/pytorch/pytorch/issues/38228).
        gc.collect()


def _print(error: BaseException, verdict: Verdict) -> None:
    """Print what this rank says about its end. What every rank knows, only rank 0 says."""
    is_first = int(os.environ.get("RANK", 0)) == 0
    if verdict.exit_code == 2:
        if not is_first:
            # Most mistakes are found by every rank, and torchrun ends all ranks when the first one exits. A rank that
            # is still alive after 5 s found one that rank 0 did not find, such as a corrupt image, unless the ranks
            # were not connected: then rank 0, perhaps on another machine, reports it.
            time.sleep(5)
        if is_first or getattr(error, "is_of_this_rank", False) or _has_process_group():
            print(f"error: {verdict.reason}", file=sys.stderr, flush=True)
    elif verdict.exit_code == 75:
        # torchrun raises when it receives the signal. scripts/launch.sh prevents that, and sets the variable.
        is_alone = "TORCHELASTIC_RUN_ID" in os.environ and RANKS_VARIABLE not in os.environ
        if is_first:
            print(verdict.reason + ("; a traceback below is torchrun's own" if is_alone else ""), file=sys.stderr)
    elif isinstance(error, OutOfMemory) or (isinstance(error, NotSaved) and is_first):
        print(f"error: {verdict.reason}", file=sys.stderr, flush=True)
    elif not isinstance(error, NotSaved):
        traceback.print_exc()


def exit_at_once(code: int) -> NoReturn:
    """Exit without exit handlers, which on NCCL may wait for a pending collective until its timeout."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
            stream.flush()
    os._exit(code)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Context manager for commands that only print: if `| head` has read enough, the command exits with code 0."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _may_wait_for_others() -> bool:
    """Whether collectives with other ranks may be pending. A run that ends normally has closed its process group."""
    return _has_process_group() and sys.modules["torch.distributed"].get_world_size() > 1


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def judge_ranks(
    ranks: Sequence[Mapping[str, Any]], *, num_ranks: int, was_signalled: bool = False, killed: str | None = None
) -> Verdict:
    """How a job ended, after all its processes have ended.

    Out of memory on any rank gives `oom`. Otherwise, the first rank that failed by itself gives the reason.
    Ranks that failed because another one was gone come last. After a signal, their reasons are ignored.

    Args:
        ranks: what each rank wrote (supervision/rank_status.py); a rank that never started wrote nothing.
        num_ranks: number of ranks that were started.
        was_signalled: whether the launcher forwarded a signal.
        killed: what the launcher knows of a rank that was killed before it could write.
    """

    def importance(rank: Mapping[str, Any]) -> tuple[bool, bool, bool, float]:
        reason = str(rank["reason"])
        is_others = rank["state"] != "oom" and is_peer_failure(reason)
        return rank["state"] != "oom", is_others, not reason.startswith(LOST_RANK), rank["time"]

    failed = sorted((rank for rank in ranks if rank["state"] in ("oom", "error")), key=importance)
    if failed and not importance(failed[0])[1]:
        status, reason = failed[0]["state"], failed[0]["reason"]
        if failed[0].get("exit_code") == 2:  # a mistake of the user, not of one rank
            return Verdict(status, 2, str(reason))
        return Verdict(status, 3 if status == "oom" else 1, f"rank {failed[0]['rank']}: {reason}")
    num_completed = sum(rank["state"] == "completed" for rank in ranks)
    if num_completed == num_ranks:
        return Verdict("completed", 0, f"{num_ranks} rank(s)")
    interrupted = next((rank for rank in ranks if rank["state"] == "interrupted"), None)
    if interrupted is not None and not failed:
        return Verdict("interrupted", 75, f"rank {interrupted['rank']}: {interrupted['reason']}")
    if was_signalled:
        reason = "ended by the signal before its ranks could save; the same command continues from the last checkpoint"
        return Verdict("interrupted", 75, reason)
    if failed and killed is None:
        return Verdict("error", 1, f"rank {failed[0]['rank']}: {failed[0]['reason']}")
    silent = f"{num_ranks - num_completed} of {num_ranks} rank(s) exited without an error message"
    return Verdict("error", 1, killed or f"{silent}, as if killed by the system")


def main() -> int:
    """Determine how a finished job ended. Returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchditan.supervision.exit_status", description="How the ranks of a job ended."
    )
    parser.add_argument("folder", help=f"folder that the ranks wrote to (their environment variable {RANKS_VARIABLE})")
    parser.add_argument("--num_ranks", type=int, required=True, help="number of ranks that were started")
    parser.add_argument("--signalled", action="store_true", help="the ranks received a stop signal")
    given = parser.parse_args()
    verdict = judge_ranks(read_rank_statuses(given.folder), num_ranks=given.num_ranks, was_signalled=given.signalled)
    code = "" if verdict.exit_code == 2 else f" (exit code {verdict.exit_code})"  # a mistake is the rank's own line
    print(f"{verdict.status}: {verdict.reason}{code}", file=sys.stderr)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
