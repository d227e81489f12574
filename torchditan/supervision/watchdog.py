# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Finds the lost rank when a collective fails or never ends.

A killed or stuck rank cannot report itself, and the errors of the other ranks do not identify it. So once a second,
each rank publishes its place in the process group's store: its step, its activity, and the number of collectives that
it started (counted by torch's Flight Recorder). When a collective fails, `RankWatch.explain_lost_rank` looks for

1. a rank on this machine whose process has exited, and its wait status, unless torchrun has already collected it;
2. a reason that another rank already found;
3. a rank that no longer publishes: it is stopped, or its machine is gone;
4. rank 0, if the store does not answer: its process or its launcher has the store;
5. the rank that started the fewest collectives: the others wait for it.

The publishing thread also watches the processes of this machine and the next rank. If the main thread does not return,
the watching thread ends the process after the timeout. The main thread may still be computing, or NCCL may raise no
error in waiting ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from torchditan.distributed.process_group import Rank
from torchditan.supervision.lost_rank import LOST_RANK, describe_end, exit_at_once, is_peer_failure, read_process

_BEAT_S = 1.0
_PATIENCE_S = 2.5
"""How long a failing rank looks for the reason; a live rank publishes at least once in this time."""
_GRACE_S = 5.0
"""How long the watching thread gives the main thread to find the same loss by itself."""
_SHARE_OF_TIMEOUT = 0.9
"""NCCL ends the process at the timeout; the reason must be written before."""

Record = dict[str, Any]


class Group(NamedTuple):
    """How many collectives of one process group this rank started, and how many are known to be complete."""

    began: int
    completed: int
    on_device: bool


class RankWatch:
    """Publishes the place of this rank and finds lost ranks. All ranks create one together.

    Args:
        rank: this process, one of several.
        timeout_seconds: timeout of collectives; the attribute follows `process_group.set_timeout`.
        on_lost: called in the watching thread with the reason, before that thread ends a process whose main thread
            does not return. It records the reason. Without it, the thread never ends the process.
        folder: where each rank writes its Flight Recorder contents when one is stuck.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        timeout_seconds: float,
        on_lost: Callable[[str], None] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.on_lost = on_lost
        self.folder = folder
        self._place: tuple[int, str, float] = (0, "starting", time.monotonic())
        self._has_left = threading.Event()
        self._leaving: str | None = None  # set once this rank ends: the reason, or ""
        self._publishing = threading.Lock()
        self._num_beats = 0
        self._collectives: dict[str, Group] = {}
        self._moved_at = time.monotonic()
        self._successor_beat, self._successor_seen = 0, time.monotonic()
        self._connected_at = time.monotonic()
        # A separate connection: while one thread waits for an answer, no other thread can use the connection.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        process = read_process(os.getpid())
        self._identity: Record = {
            "rank": rank.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": process and process.started,
        }
        if folder is not None and rank.device.type == "cuda":
            folder.mkdir(parents=True, exist_ok=True)  # NCCL writes there but does not create the folder
        # torchrun keeps one store across restarts. After this barrier, no rank reads keys of an earlier attempt.
        self._publish()
        records: list[Any] = [None] * rank.world_size
        dist.all_gather_object(records, self._identity)
        self._connected_at = time.monotonic()  # the same moment on all ranks
        # From now on, a store that does not answer means that its machine is gone.
        self._store.set_timeout(timedelta(seconds=_GRACE_S))
        self._neighbours = [
            record
            for record in records
            if record["host"] == self._identity["host"] and record["started"] and record["rank"] != rank.rank
        ]
        self._ends: dict[int, str] = {}
        self._poller = select.poll()
        self._pidfds = self._open_neighbours()
        threading.Thread(target=self._watch, name="rank watch", daemon=True).start()

    def note(self, step: int, place: str) -> None:
        """Record that this rank is now in `step`, doing `place`; costs well under a microsecond."""
        self._place = (step, place, time.monotonic())

    def close(self) -> None:
        """Mark the end of this rank as intended, so that others do not report it as lost."""
        if not self._has_left.is_set():
            self._leave("")

    def explain_lost_rank(self, error: BaseException) -> str | None:
        """One line on the lost rank that caused `error`; None if this rank caused the error, or no rank is lost.

        Call it where the error is caught, before this process ends; it takes up to 3 s. The line starts with
        `lost_rank.LOST_RANK`.
        """
        was_leaving = self._has_left.is_set()
        if not was_leaving:
            self._leave("")
        if not is_peer_failure(f"{type(error).__name__}: {error}"):
            return None
        if was_leaving:
            return self._leaving or None  # the watching thread found the lost rank first and is ending this process
        waited_in = _collective_in(error)
        try:
            reason = self._find_lost(waited_in)
        except RuntimeError:  # the store does not answer, so the records cannot be read
            return self._call_store_gone(waited_in)
        self._leave(reason or "")
        return reason

    def _find_lost(self, waited_in: str) -> str | None:
        earlier = self._records()
        deadline, pause = time.monotonic() + _PATIENCE_S, 0.001
        reason = self._find_gone() or self._find_told()
        while reason is None and time.monotonic() < deadline:
            time.sleep(pause)  # short at first: wait statuses disappear when torchrun collects them
            pause = min(2 * pause, 0.1)
            reason = self._find_gone() or self._find_told()
        if reason is None:
            reason = self._find_silent(earlier, waited_in) or self._find_behind(waited_in)
            self._dump_collectives()
        return reason

    def _watch(self) -> None:
        while not self._has_left.is_set():
            self._wait_a_beat()
            if self._has_left.is_set():
                return
            self._publish()
            if self.on_lost is None:
                continue
            try:
                reason = self._find_gone()
                if reason is not None and self._has_left.wait(_GRACE_S):
                    return
                reason = reason or self._find_silent_successor()
            except RuntimeError:  # the store is gone: the main thread finds it by itself
                return
            if reason is None and self._is_stuck():
                reason = self._explain_wait()
            if reason is not None:
                self._leave(reason)
                self.on_lost(reason)
                print(f"rank {self.rank.rank}: {reason}", file=sys.stderr)
                exit_at_once(1)

    def _open_neighbours(self) -> dict[int, Record]:
        """Ranks of this machine by the file descriptor that signals their exit, if the system supports it."""
        pidfds: dict[int, Record] = {}
        for neighbour in self._neighbours if hasattr(os, "pidfd_open") else ():
            with contextlib.suppress(OSError):  # a process that has already exited is found without it
                pidfds[os.pidfd_open(neighbour["pid"])] = neighbour
        for pidfd in pidfds:
            self._poller.register(pidfd, select.POLLIN)
        return pidfds

    def _wait_a_beat(self) -> None:
        """Sleep until the next beat, or until a rank of this machine exits, to read its wait status before torchrun."""
        for pidfd, _ in self._poller.poll(1000 * _BEAT_S):
            self._poller.unregister(pidfd)
            neighbour = self._pidfds[pidfd]
            process = read_process(neighbour["pid"])
            if process is not None and process.has_ended:
                self._ends[neighbour["rank"]] = describe_end(process.wait_status)

    def _leave(self, reason: str) -> None:
        self._leaving = reason
        self._has_left.set()
        self._publish()

    def _publish(self) -> None:
        step, place, since = self._place
        collectives = _collectives()
        if collectives != self._collectives:
            self._collectives, self._moved_at = collectives, time.monotonic()
        self._num_beats += 1
        record: Record = {
            **self._identity,
            "beat": self._num_beats,
            "time": time.monotonic() - self._connected_at,  # clocks of two machines may differ
            "step": step,
            "place": place,
            "seconds": time.monotonic() - since,
            "began": self._num_began(),
        }
        # If the store disappears before this rank does, other ranks report it.
        with self._publishing, contextlib.suppress(RuntimeError):
            text = json.dumps({**record, "leaving": self._leaving})
            _answer(lambda: self._store.set(f"watch/{self.rank.rank}", text))

    def _num_began(self) -> int:
        return sum(group.began for group in self._collectives.values())

    def _records(self) -> list[Record]:
        """The last published place of each other rank."""
        others = [f"watch/{other}" for other in range(self.rank.world_size) if other != self.rank.rank]
        return [json.loads(record) for record in _answer(lambda: self._store.multi_get(others))]

    def _record_of(self, rank: int) -> Record:
        record: Record = json.loads(_answer(lambda: self._store.get(f"watch/{rank}")))
        return record

    def _find_gone(self) -> str | None:
        """A rank of this machine whose process exited without announcing it."""
        for neighbour in self._neighbours:
            process = read_process(neighbour["pid"])
            if process is not None and process.started == neighbour["started"] and not process.has_ended:
                continue
            record = self._record_of(neighbour["rank"])
            if record["leaving"] is None:
                how = self._ends.get(record["rank"], "its process is gone")
                if process is not None and process.has_ended:
                    how = describe_end(process.wait_status)
                return f"{LOST_RANK} {record['rank']}: {how}, last seen in {_place(record)}"
        return None

    def _find_told(self) -> str | None:
        reasons = (record["leaving"] or "" for record in self._records())
        return next((reason for reason in reasons if reason.startswith(LOST_RANK)), None)

    def _find_silent(self, earlier: list[Record], waited_in: str) -> str | None:
        for record, before in zip(self._records(), earlier, strict=True):
            if record["leaving"] is None and record["beat"] == before["beat"]:
                return self._call_silent(record, time.monotonic() - self._connected_at - record["time"], waited_in)
        return None

    def _find_silent_successor(self) -> str | None:
        """The next rank, if it published nothing for as long as a collective may take. Each rank watches one other, so
        all are watched with one store request per rank and second."""
        record = self._record_of((self.rank.rank + 1) % self.rank.world_size)
        if record["beat"] != self._successor_beat:
            self._successor_beat, self._successor_seen = record["beat"], time.monotonic()
        seconds = time.monotonic() - self._successor_seen
        if record["leaving"] is not None or seconds < self.timeout_seconds:
            return None
        self._dump_collectives()
        return self._call_silent(record, seconds, _newest_collective() or "a collective")

    def _call_store_gone(self, waited_in: str) -> str | None:
        if self.rank.rank == 0:
            return None
        gone = "its store does not answer (killed, or its machine is gone or cut off)"
        return f"{LOST_RANK} 0: {gone}; rank {self.rank.rank} waited for it in {waited_in}"

    def _call_silent(self, record: Record, seconds: float, waited_in: str) -> str:
        silent = f"no sign of it for {seconds:.0f} s (stopped, or its machine is gone), last seen in {_place(record)}"
        return f"{LOST_RANK} {record['rank']}: {silent}; rank {self.rank.rank} waited for it in {waited_in}"

    def _find_behind(self, waited_in: str) -> str | None:
        own = (self._num_began(), self._place[0])
        staying = [record for record in self._records() if record["leaving"] is None]
        last = min(staying, key=lambda record: (record["began"], record["step"]), default=None)
        if last is None or (last["began"], last["step"]) >= own:
            return None
        waited = f"rank {self.rank.rank} waited for it in {waited_in}, {own[0] - last['began']} collective(s) ahead"
        return f"{LOST_RANK} {last['rank']}: for {last['seconds']:.0f} s in {_place(last)}; {waited}"

    def _is_stuck(self) -> bool:
        """Whether device collectives are pending and none of them progresses. gloo's raise errors by themselves."""
        on_device = [group for group in self._collectives.values() if group.on_device]
        is_waiting = any(group.began > group.completed for group in on_device)
        return is_waiting and time.monotonic() - self._moved_at > _SHARE_OF_TIMEOUT * self.timeout_seconds

    def _explain_wait(self) -> str:
        waited_in = _newest_collective() or "a collective"
        try:
            reason = self._find_lost(waited_in)
        except RuntimeError:
            reason = None
        step, place, _ = self._place
        unknown = f"{waited_in} in step {step}, {place}, did not end although all ranks started it"
        return reason or f"{LOST_RANK} unknown: {unknown}"

    def _dump_collectives(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for recorder, on_device in _recorders():
                name = f"rank_{self.rank.rank}{'_device' if on_device else ''}.json"
                (self.folder / name).write_bytes(recorder(True, False))


def _answer(question: Callable[[], Any]) -> Any:
    """What the store answers within `_GRACE_S`. torch has no such limit: after its timeout it waits until the store
    confirms the timeout, for ever if the link is cut.

    Raises:
        RuntimeError: the store failed, or gave no answer.
    """
    answers: queue.SimpleQueue[tuple[Any, RuntimeError | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((question(), None))
        except RuntimeError as error:
            answers.put((None, error))

    threading.Thread(target=ask, name="store", daemon=True).start()
    try:
        answer, error = answers.get(timeout=_GRACE_S)
    except queue.Empty:
        raise RuntimeError(f"no answer from the store for {_GRACE_S:g} s") from None
    if error is not None:
        raise error
    return answer


def _place(record: Record) -> str:
    return f"step {record['step']}, {record['place']}"


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


def _collectives() -> dict[str, Group]:
    """Progress of the collectives of each process group; empty if the recorder is off."""
    groups: dict[str, Group] = {}
    for recorder, on_device in _recorders():
        for name, status in json.loads(recorder(False, False)).get("pg_status", {}).items():
            began, completed = (int(status[f"last_{done}_collective"]) for done in ("enqueued", "completed"))
            groups[f"{name} on the device" if on_device else name] = Group(max(0, began), max(0, completed), on_device)
    return groups


def _newest_collective() -> str | None:
    """Name of the collective that this rank started last, such as "gloo:all_reduce"."""
    entries = [entry for recorder, _ in _recorders() for entry in json.loads(recorder(True, False)).get("entries", [])]
    newest = max(entries, key=lambda entry: entry["time_created_ns"], default=None)
    return None if newest is None else str(newest["profiling_name"])


def _collective_in(error: BaseException) -> str:
    """Name of the collective that failed: from the recorder, else torch's function in the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    functions = [frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")]
    return _newest_collective() or (functions[-1] if functions else "a collective")
