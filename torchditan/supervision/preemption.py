# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Stopping a run from outside: SIGTERM, SIGUSR1 or Ctrl-C end it after a step that all ranks agree on.

Notable:
- a signal is only a request. Once per step, ranks share it (`StopPoint` in checkpoint/run_checkpoints.py), and all stop
  after the same step, even if only one received the signal;
- signals within a second of the first are the same request: a cluster signals every process of a job, and torchrun
  forwards signals that it receives. A later signal ends the rank immediately;
- a rank that waits for data cannot finish its step. Within 30 s of the signal it ends with what is saved;
- all this works while the main thread is blocked, because a separate thread reads the signals;
- loader workers ignore these signals (data_stream/workers.py).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from torchditan.supervision.parent_death import outlive_launcher

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SAME_REQUEST_S = 1.0
_LONG_WAIT_S = 60.0
"""Seconds without data before a rank says what it waits for."""
_PATIENCE_S = 28.0
"""How long a rank that was asked to stop waits for data. torchrun and many clusters kill it after 30 s."""
_BEAT_S = 1.0


class StopRequest:
    """Context manager in which signals request a stop instead of ending the process.

    Outside the main thread it does nothing: only the main thread may handle signals.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first signal that arrived."""
        self.record: Callable[[str], None] = lambda reason: None
        """Called with the reason before a signal ends this rank without an agreement."""
        self._received_at = 0.0
        self._wait: tuple[float, Callable[[], str]] | None = None  # since when this rank waits for data, and for which
        self._reported_wait = 0.0  # since when
        self._restoring = ExitStack()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            self._restoring.callback(os.close, writing)  # ends the loop of the watching thread
            self._restoring.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
            for number in SIGNALS:
                self._restoring.callback(self._restore, number, signal.signal(number, _outlive_launcher))
            os.register_at_fork(after_in_child=_forget_wakeup)
            threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._restoring.close()

    def _restore(self, number: signal.Signals, handler: Any) -> None:
        # Copies of the request may arrive while this rank exits. If one killed it, torchrun would restart the rank.
        is_ending = self.signal is not None and "TORCHELASTIC_RUN_ID" in os.environ
        signal.signal(number, signal.SIG_IGN if is_ending else handler)

    def _watch(self, pipe: int) -> None:
        """Runs in a separate thread; reads one byte for each signal that Python handles."""
        while True:
            if select.select([pipe], [], [], _BEAT_S)[0]:
                numbers = os.read(pipe, 1)
                if not numbers:
                    break
                if numbers[0] in SIGNALS:
                    self._receive(signal.Signals(numbers[0]))
            self._check_wait()
        os.close(pipe)

    def _check_wait(self) -> None:
        """A function of its own: `describe` belongs to the trainer, which this thread must not keep alive."""
        if (wait := self._wait) is None:
            return
        (since, describe), now = wait, time.monotonic()
        if now - since > _LONG_WAIT_S and since != self._reported_wait:
            self._reported_wait = since
            print(f"no data for {now - since:.0f} s: {describe()}", file=sys.stderr, flush=True)
        if self.signal is not None and now - max(since, self._received_at) > _PATIENCE_S:
            self._end(f"stopped by {self.signal.name}, without data for {now - since:.0f} s: {describe()}")

    @contextmanager
    def waiting_for_data(self, describe: Callable[[], str]) -> Iterator[None]:
        """Context manager around a wait for data. `describe` returns who waits for what, for messages."""
        self._wait = (time.monotonic(), describe)
        try:
            yield
        finally:
            self._wait = None

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = number, now
        elif now - self._received_at > _SAME_REQUEST_S:
            self._end(f"{number.name} again: exiting immediately")

    def _end(self, reason: str) -> None:
        print(reason, file=sys.stderr, flush=True)
        recording = threading.Thread(target=self.record, args=(reason,), daemon=True)  # its disk may hang
        recording.start()
        recording.join(timeout=2)
        os._exit(0 if "TORCHELASTIC_RUN_ID" in os.environ else 75)  # torchrun restarts failed ranks


def _outlive_launcher(number: int, frame: FrameType | None) -> None:
    """Undo `die_with_launcher` in the main thread, which called it. A rank that received a stop request saves first,
    even if its launcher is gone. The watching thread reads the request itself."""
    outlive_launcher()


def _forget_wakeup() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
