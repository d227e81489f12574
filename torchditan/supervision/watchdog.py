# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Finds the lost rank when a collective fails or never ends.

A killed or stuck rank cannot report itself, and the errors of the other ranks do not identify it. torchrun's error
files and its report know exit codes, but not which rank the others wait for. So once a second, a thread of each rank
publishes its place in the process group's store: its step, its activity, and the number of collectives that it started
(counted by torch's Flight Recorder). This thread alone looks for the cause; a main thread whose collective failed asks
it. It finds

1. a rank on this machine whose process exited, and the signal that killed it;
2. a cause that another rank published;
3. a rank that no longer publishes: it is stopped, or its machine is gone;
4. the rank that started the fewest collectives: the others wait for it.

If it gives no answer, the store is gone: rank 0, or its machine. A main thread that does not notice the loss, because
it computes or waits for NCCL, is ended with its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from torchditan.distributed.process_group import Rank
from torchditan.supervision.exit_status import LOST_RANK, STOPPED_BY, exit_at_once, is_peer_failure

_BEAT_S = 1.0
_PATIENCE_S = 2.5
"""How long the cause is looked for; a live rank publishes at least once in this time."""
_GRACE_S = 5.0
"""How long the store may take to answer, and the main thread to notice a loss by itself."""
_SHARE_OF_TIMEOUT = 0.9
"""NCCL ends the process at the timeout; the cause must be written before."""

Record = dict[str, Any]


class RankWatch:
    """Publishes the place of this rank and finds lost ranks. All ranks create one together.

    Args:
        rank: this process, one of several.
        timeout_seconds: timeout of collectives; the attribute follows `process_group.set_timeout`.
        on_lost: records the cause, before the watching thread ends a process whose main thread does not return.
        folder: where each rank writes its Flight Recorder contents when one is stuck.
    """

    def __init__(self, rank: Rank, *, timeout_seconds: float, on_lost: Callable[[str], None], folder: Path) -> None:
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.on_lost = on_lost
        self.folder = folder
        self.cause: str | None = None
        self._place = (0, "starting", time.monotonic())
        self._beat = 0
        self._collectives: dict[tuple[str, bool], tuple[int, int]] = {}
        self._moved_at = time.monotonic()
        self._main_ends = threading.Event()
        self._own_reason = ""  # why the main thread ends, for the other ranks
        self._waited_in: str | None = None  # its collective that failed
        self._has_answered = False
        # A separate connection: while one thread waits for an answer, no other thread can use the connection.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        if rank.device.type == "cuda":
            folder.mkdir(parents=True, exist_ok=True)  # NCCL writes there but does not create the folder
        self._publish()
        processes: list[Any] = [None] * rank.world_size
        dist.all_gather_object(processes, (socket.gethostname(), os.getpid()))  # from here on, all have published
        self._store.set_timeout(timedelta(seconds=_GRACE_S))
        self._poller = select.poll()
        reading, self._waking = os.pipe()
        self._poller.register(reading, select.POLLIN)
        self._neighbours: dict[int, tuple[int, int]] = {}  # descriptor of a process -> its rank and process id
        for other, (host, pid) in enumerate(processes):
            if host == socket.gethostname() and other != rank.rank and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):  # it has exited: it no longer publishes
                    pidfd = os.pidfd_open(pid)
                    self._neighbours[pidfd] = (other, pid)
                    self._poller.register(pidfd, select.POLLIN)
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def note(self, step: int, place: str) -> None:
        """Record that this rank is now in `step`, doing `place`; costs well under a microsecond."""
        self._place = (step, place, time.monotonic())

    def close(self) -> None:
        """Publish that this rank ends as intended, so that others do not report it as lost."""
        self._end()

    def explain(self, error: BaseException, reason: str) -> str | None:
        """One line on the other rank that caused `error`; None if this rank caused it. Takes up to 8 s.

        The line starts with `LOST_RANK`, or with `STOPPED_BY` if the other rank failed by itself and recorded that.

        Args:
            reason: of `error`, for the other ranks.
        """
        is_others = is_peer_failure(f"{type(error).__name__}: {error}")
        self._own_reason = f"{STOPPED_BY} {self.rank.rank}: {reason}"
        self._waited_in = _newest_collective() if is_others else None
        self._end()
        if self.cause is not None or self._has_answered or not is_others or self.rank.rank == 0:
            return self.cause
        gone = "its store does not answer (killed, or its machine is gone or cut off)"
        return f"{LOST_RANK} 0: {gone}; rank {self.rank.rank} waited for it in {self._waited_in}"

    def _end(self) -> None:
        """Have the watching thread look for a cause, publish it and end. It does not if the store hangs."""
        if not self._main_ends.is_set():
            self._main_ends.set()
            os.write(self._waking, b"\0")
            self._thread.join(_PATIENCE_S + _GRACE_S)

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store does not answer
            while self.cause is None and not self._main_ends.is_set():
                self._publish()
                self.cause = self._find_exited(_BEAT_S)
                if self.cause is not None:
                    self._main_ends.wait(_GRACE_S)
                elif self._is_stuck():
                    self.cause = self._find_lost(_newest_collective()) or self._describe_stuck()
            if not self._main_ends.is_set():
                assert self.cause is not None
                self._publish(leaving=self.cause)
                self.on_lost(self.cause)
                print(f"rank {self.rank.rank}: {self.cause}", file=sys.stderr)
                exit_at_once(1)
            self.cause = self.cause or self._find_published()
            if self.cause is None and self._waited_in is not None:
                self.cause = self._find_lost(self._waited_in)
            self._publish(leaving=self.cause or self._own_reason)
            self._has_answered = True

    def _publish(self, leaving: str | None = None) -> None:
        """Write the place of this rank, and once it ends, `leaving`: the cause if it is known, or ""."""
        step, place, since = self._place
        collectives = _collectives()
        if collectives != self._collectives:
            self._collectives, self._moved_at = collectives, time.monotonic()
        self._beat += 1
        record: Record = {
            "rank": self.rank.rank,
            "beat": self._beat,
            "step": step,
            "place": place,
            "seconds": time.monotonic() - since,
            "began": self._num_began(),
            "leaving": leaving,
        }
        self._store.set(f"watch/{self.rank.rank}", json.dumps(record))

    def _num_began(self) -> int:
        return sum(began for began, _ in self._collectives.values())

    def _records(self) -> list[Record]:
        """The last published place of each other rank."""
        others = [f"watch/{other}" for other in range(self.rank.world_size) if other != self.rank.rank]
        return [json.loads(record) for record in self._store.multi_get(others)]

    def _find_lost(self, waited_in: str) -> str | None:
        """The rank that others wait for in a collective that failed, or does not end."""
        self._publish(leaving="")  # it publishes nothing while it looks, and is not the lost rank
        earlier = {record["rank"]: record["beat"] for record in self._records()}
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            if (cause := self._find_exited(_PATIENCE_S / 20) or self._find_published()) is not None:
                return cause
        self._dump_collectives()
        staying = [record for record in self._records() if record["leaving"] is None]
        waited = f"rank {self.rank.rank} waited for it in {waited_in}"
        for record in staying:
            if record["beat"] == earlier[record["rank"]]:
                seconds = _PATIENCE_S + _BEAT_S * max(0, self._beat - record["beat"])
                silent = f"no sign of it for about {seconds:.0f} s (stopped, or its machine is gone)"
                return f"{LOST_RANK} {record['rank']}: {silent}, {_last_seen(record)}; {waited}"
        own = (self._num_began(), self._place[0])
        last = min(staying, key=lambda record: (record["began"], record["step"]), default=None)
        if last is None or (last["began"], last["step"]) >= own:
            return None
        where = f"for {last['seconds']:.0f} s in step {last['step']}, {last['place']}"
        return f"{LOST_RANK} {last['rank']}: {where}; {waited}, {own[0] - last['began']} collective(s) ahead"

    def _find_exited(self, wait_s: float) -> str | None:
        """A rank of this machine that exits without having published why. It is read before torchrun collects it."""
        for pidfd, _ in self._poller.poll(1000 * wait_s):
            self._poller.unregister(pidfd)
            if pidfd in self._neighbours:  # else the main thread woke this one
                rank, pid = self._neighbours[pidfd]
                how = _describe_end(pid)
                record: Record = json.loads(self._store.get(f"watch/{rank}"))
                if record["leaving"] is None:
                    return f"{LOST_RANK} {rank}: {how}, {_last_seen(record)}"
        return None

    def _find_published(self) -> str | None:
        """What another rank found, or why it failed itself."""
        published = [record["leaving"] for record in self._records() if record["leaving"]]
        return min(published, key=lambda cause: not cause.startswith(LOST_RANK), default=None)

    def _is_stuck(self) -> bool:
        """Whether device collectives are pending and none of them progresses. gloo's raise errors by themselves."""
        counts = [counts for (_, on_device), counts in self._collectives.items() if on_device]
        is_waiting = any(began > completed for began, completed in counts)
        return is_waiting and time.monotonic() - self._moved_at > _SHARE_OF_TIMEOUT * self.timeout_seconds

    def _describe_stuck(self) -> str:
        step, place, _ = self._place
        where = f"{_newest_collective()} in step {step}, {place}"
        return f"{LOST_RANK} unknown: {where}, did not end although all ranks started it"

    def _dump_collectives(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for recorder, on_device in _recorders():
            name = f"rank_{self.rank.rank}{'_device' if on_device else ''}.json"
            (self.folder / name).write_bytes(recorder(True, False))


def _last_seen(record: Record) -> str:
    return f"last seen in step {record['step']}, {record['place']}"


def _describe_end(pid: int) -> str:
    """How the process of a rank ended, from its zombie, which torchrun collects within 0.1 s."""
    try:
        wait_status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
    except OSError:
        return "its process is gone"
    if not os.WIFSIGNALED(wait_status):
        return f"exited with code {os.WEXITSTATUS(wait_status)} without an error message"
    number = os.WTERMSIG(wait_status)
    why = " (possibly by the system, out of memory)" if number == signal.SIGKILL else ""
    return f"killed by {signal.Signals(number).name}{why}"


def record_collectives(folder: Path) -> None:
    """Have torch's Flight Recorder keep the last 2,000 collectives, and NCCL write them to `folder` on a timeout.

    Call it before the process group is created. Environment variables that are already set are kept.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "rank_"))


def _recorders() -> list[tuple[Callable[[bool, bool], bytes], bool]]:
    """Dump functions of torch's Flight Recorders: (collectives, only active) -> JSON. The bool marks the device's."""
    known = (("_dump_nccl_trace_json", True), ("_dump_fr_trace_json", False))
    return [(getattr(c10d, name), on_device) for name, on_device in known if hasattr(c10d, name)]


def _collectives() -> dict[tuple[str, bool], tuple[int, int]]:
    """(process group, whether on the device) -> collectives that began and that completed; {} without recorder."""
    found = {}
    for recorder, on_device in _recorders():
        for name, status in json.loads(recorder(False, False)).get("pg_status", {}).items():
            began, completed = (int(status[f"last_{done}_collective"]) for done in ("enqueued", "completed"))
            found[name, on_device] = (max(0, began), max(0, completed))  # -1 before the first
    return found


def _newest_collective() -> str:
    """Name of the collective that this rank started last, such as "gloo:all_reduce"."""
    entries = [entry for recorder, _ in _recorders() for entry in json.loads(recorder(True, False)).get("entries", [])]
    newest = max(entries, key=lambda entry: entry["time_created_ns"], default=None)
    return "a collective" if newest is None else str(newest["profiling_name"])
