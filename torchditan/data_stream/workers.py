# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Worker processes and threads of the loader. They ignore stop signals and exit when their rank exits."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from torchditan.supervision.parent_death import die_with_parent
from torchditan.supervision.preemption import SIGNALS

Result = TypeVar("Result")


def run_ahead(
    function: Callable[[list[int]], Result], positions: Iterator[list[int]], *, num_threads: int, ahead: int
) -> Iterator[Result]:
    """Results of `function` for the positions of each batch, in order. Threads compute the next `ahead` of them."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="batches")
    try:
        pending = deque(pool.submit(function, next(positions)) for _ in range(ahead))
        while True:
            pending.append(pool.submit(function, next(positions)))
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # the next epoch may fork loader workers immediately


def init_worker(worker: int) -> None:
    """Ignore the signals that stop a rank, and exit when the rank exits. Runs in each loader worker.

    A stopping rank needs the next batch to finish its step, and clusters signal every process of a job.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


_workers: set[BaseProcess] = set()
_newest: Iterator[Any] | None = None


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a loader and register its workers for `end_loader_workers`."""
    global _newest
    before = set(multiprocessing.active_children())
    _newest = iterator = iter(loader)
    _workers.update(set(multiprocessing.active_children()) - before)
    return iterator


def awaited_worker() -> str:
    """The worker that has the next batch of the newest loader, such as "worker 1 of 4", for messages."""
    tasks, workers = getattr(_newest, "_task_info", {}), getattr(_newest, "_workers", [])
    task = tasks.get(getattr(_newest, "_rcvd_idx", None))
    return "a batch" if task is None else f"worker {task[0]} of {len(workers)} (counted from 0)"


def end_loader_workers() -> None:
    """End the remaining workers when a run is over. They ignore the SIGTERM that Python sends them."""
    workers = [worker for worker in multiprocessing.active_children() if worker in _workers]
    _workers.clear()
    if not workers or threading.current_thread() is not threading.main_thread():
        return
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's loader treats a dead worker as a failure
    for worker in workers:
        worker.kill()
        worker.join()
    signal.signal(signal.SIGCHLD, previous)
