# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Copies a state, so that training continues while the copy is written.

Notable:
- the memory of the copy is allocated once and reused by the next save;
- every pinned copy gets separate memory pages. CUDA pins whole pages and refuses pages that are already pinned, and
  malloc places small tensors on shared pages.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
import torch.cuda._pin_memory_utils as pin_memory_utils
from torch.distributed.checkpoint._state_dict_stager import StateDictStager


class Stager:
    """Copies a state to host memory that belongs to the stager.

    Args:
        pinned: whether this memory is pinned; requires CUDA.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self._stager = _PinnedStager() if pinned else StateDictStager()

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy the state. The copy is valid until the next call, which reuses its memory."""
        staged: dict[str, Any] = self._stager.stage(state, non_blocking=self.pinned)
        if self.pinned:
            torch.accelerator.synchronize()
        return staged


class _PinnedStager(StateDictStager):
    def _stage_untyped_storage(self, storage: torch.UntypedStorage, non_blocking: bool = False) -> torch.UntypedStorage:
        if storage not in self._cached_storage_mapping and storage.nbytes() >= self.pin_memory_min_bytes:
            self._cached_storage_mapping[storage] = _allocate_pinned(storage.nbytes())
        return super()._stage_untyped_storage(storage, non_blocking=non_blocking)


def _allocate_pinned(num_bytes: int) -> torch.UntypedStorage:
    """Pinned host memory that starts at a page boundary and shares no page."""
    # Anonymous shared mapping: a fork, for example of a loader worker, does not move the pages that CUDA pinned.
    storage = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()
    pin_memory_utils.pin_memory(storage.data_ptr(), storage.nbytes())
    unpin = weakref.finalize(storage, pin_memory_utils.unpin_memory, storage.data_ptr())
    unpin.atexit = False  # CUDA may be shut down by then
    return storage
