# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""How a run ended: its status, a reason of one line, and the exit code of the process.

Exit codes: 0 done, 2 a mistake of the user, 3 out of memory, 75 interrupted and resumable, 1 anything else.

torchrun always exits with 1 if a rank fails, so scripts/launch.sh determines the code with this command:

    python -m torchditan.supervision.exit_status FOLDER --num_ranks 8

It reads what the ranks wrote into the folder, prints one line on how they ended, and exits with the matching code.
"""

from __future__ import annotations

import argparse
import errno
import gc
import io
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torchditan.config.errors import ConfigError, shorten
from torchditan.distributed.cpu_threads import limit_spinning
from torchditan.run.rank_status import RANKS_VARIABLE, read_rank_statuses, write_rank_status
from torchditan.supervision.lost_rank import LOST_RANK, exit_at_once, is_peer_failure
from torchditan.supervision.parent_death import die_with_launcher

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
    if isinstance(error, NotSaved):
        return Verdict("error", 1, reason)
    return Verdict("error", 1, f"{type(error).__name__}: {reason}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    is_limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    texts = _OUT_OF_MEMORY + (_PERHAPS_OUT_OF_MEMORY if is_limited else ())
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def run_job(main: Callable[[], None]) -> int:
    """Run a job and return the exit code of the process; a mistake of the user prints one line.

    If the launcher asks for it, this rank always reports how it started and ended. A rank that fails while its
    process group is open exits here, without exit handlers.
    """
    try:
        return _run_job(main)
    finally:
        if _has_process_group():  # after an error in one process; torch would warn on CUDA
            with suppress(RuntimeError):  # of NCCL, once more, if the device has failed
                sys.modules["torch.distributed"].destroy_process_group()
        # Process groups that a cycle keeps alive would end while the interpreter shuts down. A thread of theirs that
        # then asks for the GIL aborts the process (https://github.com/pytorch/pytorch/issues/38228).
        gc.collect()


def _escape_unprintable() -> None:
    """In a locale without UTF-8, write other characters of names and captions as escapes, as stderr already does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run_job(main: Callable[[], None]) -> int:
    die_with_launcher()
    limit_spinning()
    _escape_unprintable()
    write_rank_status("running")
    try:
        main()
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
        if verdict.exit_code == 2:
            _report_mistake(verdict.reason, is_of_this_rank=getattr(error, "is_of_this_rank", False))
        elif verdict.exit_code == 75:
            is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
            if int(os.environ.get("RANK", 0)) == 0:
                # torchrun raises when it receives the signal. scripts/launch.sh prevents that, and sets the variable.
                is_alone = is_under_torchrun and RANKS_VARIABLE not in os.environ
                print(verdict.reason + ("; a traceback below is torchrun's own" if is_alone else ""), file=sys.stderr)
            if isinstance(error, Interrupted) and is_under_torchrun:
                return 0  # torchrun restarts failed ranks; scripts/launch.sh exits with 75
        elif isinstance(error, OutOfMemory):
            print(f"error: {verdict.reason}", file=sys.stderr)
        elif isinstance(error, NotSaved):
            if int(os.environ.get("RANK", 0)) == 0:  # every rank has it
                print(f"error: {verdict.reason}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        if _may_wait_for_others():
            exit_at_once(verdict.exit_code)
        return verdict.exit_code
    write_rank_status("completed", exit_code=0)
    return 0


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
        ranks: what each rank wrote (run/rank_status.py); a rank that never started wrote nothing.
        num_ranks: number of ranks that were started.
        was_signalled: whether the launcher forwarded a signal.
        killed: what the launcher knows of a rank that was killed before it could write.
    """
    failed = sorted((rank for rank in ranks if rank["state"] in ("oom", "error")), key=lambda rank: rank["time"])
    out_of_memory = [rank for rank in failed if rank["state"] == "oom"]
    if out_of_memory:
        return Verdict("oom", 3, _said(out_of_memory[0]))
    own = [rank for rank in failed if not is_peer_failure(str(rank["reason"]))]
    if own and own[0].get("exit_code") == 2:  # a mistake of the user, not of one rank
        return Verdict("error", 2, str(own[0]["reason"]))
    if own:
        return Verdict("error", 1, _said(own[0]))
    states = [rank["state"] for rank in ranks]
    if states.count("completed") == num_ranks:
        return Verdict("completed", 0, f"{num_ranks} rank(s)")
    interrupted = [rank for rank in ranks if rank["state"] == "interrupted"]
    if interrupted and not failed:
        return Verdict("interrupted", 75, _said(interrupted[0]))
    if was_signalled:
        reason = "ended by the signal before its ranks could save; the same command continues from the last checkpoint"
        return Verdict("interrupted", 75, reason)
    explained = sorted(failed, key=lambda rank: not str(rank["reason"]).startswith(LOST_RANK))
    unfinished = num_ranks - states.count("completed")
    silent = f"{unfinished} of {num_ranks} rank(s) exited without an error message, as if killed by the system"
    return Verdict("error", 1, killed or (_said(explained[0]) if explained else silent))


def _said(rank: Mapping[str, Any]) -> str:
    return f"rank {rank['rank']}: {rank['reason']}"


def main() -> int:
    """Determine how a finished job ended. Returns its exit code."""
    from torchditan.config.command_line import count

    parser = argparse.ArgumentParser(
        prog="python -m torchditan.supervision.exit_status", description="How the ranks of a job ended."
    )
    parser.add_argument("folder", help=f"folder that the ranks wrote to (their environment variable {RANKS_VARIABLE})")
    parser.add_argument("--num_ranks", type=count, required=True, help="number of ranks that were started")
    parser.add_argument("--signalled", action="store_true", help="the ranks received a stop signal")
    given = parser.parse_args()
    ranks = read_rank_statuses(given.folder)
    verdict = judge_ranks(ranks, num_ranks=given.num_ranks, was_signalled=given.signalled)
    code = "" if verdict.exit_code == 2 else f" (exit code {verdict.exit_code})"  # a mistake is the rank's own line
    print(f"{verdict.status}: {verdict.reason}{code}", file=sys.stderr)
    return verdict.exit_code


def _report_mistake(reason: str, *, is_of_this_rank: bool) -> None:
    if int(os.environ.get("RANK", 0)) != 0:
        # Most mistakes are found by every rank, and torchrun ends all ranks when the first one exits. The others wait,
        # so that rank 0 can report the mistake once. A rank that is still alive then found one that rank 0 did not
        # find, such as a corrupt image.
        time.sleep(5)
        if not is_of_this_rank and not _has_process_group():
            return  # found before the ranks connected: rank 0, perhaps on another machine, reports it
    print(f"error: {reason}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
