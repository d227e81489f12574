# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Stopping a run from outside: SIGTERM, SIGUSR1 or Ctrl-C end it after a step that all ranks agree on.

Notable:
- a signal is only a request. Ranks share it once a step, by a maximum over a flag in host memory on a process group of
  its own: no device is waited for, and every rank stops after the same step, though the signal may reach one alone;
- signals within a second of the first are the same request: a cluster signals every process of a job, and torchrun
  passes on what it received itself. A later one ends the rank at once;
- both hold while the main thread is in a collective that never ends: a thread of its own sees the signals;
- loader workers ignore these signals (data_stream/workers.py).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from torchditan.supervision.parent_death import outlive_launcher

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SAME_REQUEST_S = 1.0


class StopRequest:
    """While entered, signals ask for a stop instead of ending the process.

    In a thread that is not the main one it does nothing: only the main thread may handle signals.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first signal that arrived."""
        self._received_at = 0.0
        self._restore: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._pipe = (read, write)
            self._previous_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            self._restore = {number: signal.signal(number, _outlive_launcher) for number in SIGNALS}
            os.register_at_fork(after_in_child=_forget_wakeup)
            threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._restore:
            # Copies of the request may come while this rank ends, and torchrun would start again what dies of them.
            is_ending = self.signal is not None and "TORCHELASTIC_RUN_ID" in os.environ
            for number, handler in self._restore.items():
                signal.signal(number, signal.SIG_IGN if is_ending else handler)
            signal.set_wakeup_fd(self._previous_wakeup)
            os.close(self._pipe[1])  # the watching thread reads the end of it
            self._restore = {}

    def _watch(self, pipe: int) -> None:
        """Runs in its own thread: one byte for each signal that Python handles."""
        while numbers := os.read(pipe, 1):
            if numbers[0] in SIGNALS:
                self._receive(signal.Signals(numbers[0]))
        os.close(pipe)

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = number, now
        elif now - self._received_at > _SAME_REQUEST_S:
            print(f"{number.name} again: ending at once", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


class StopAgreement:
    """Whether any rank was asked to stop, the same answer on all of them at the same step."""

    def __init__(self, request: StopRequest, *, world_size: int, timeout_seconds: int) -> None:
        self.request = request
        self.group: dist.ProcessGroup | None = None
        if world_size > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Send this rank's flag; the answer is on its way while the step goes on."""
        if self._work is not None:
            self._work.wait()  # of a step whose answer nobody asked for, since it diverged
        self._flag.fill_(self.request.signal or 0)
        if self.group is not None:
            self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def result(self) -> signal.Signals | None:
        """The signal that all ranks stop for, None where there is none."""
        if self._work is not None:
            self._work.wait()
        number = int(self._flag.item())
        return signal.Signals(number) if number else None


def _outlive_launcher(number: int, frame: FrameType | None) -> None:
    """Undo `die_with_launcher` in the main thread, which called it: a rank that was asked to stop saves first, though
    its launcher be gone. The request itself is seen by the watching thread."""
    outlive_launcher()


def _forget_wakeup() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
