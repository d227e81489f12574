# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Copying a state aside, so that training continues while the copy is written.

Notable:
- the copy's memory is allocated once and filled again at the next save;
- with pinned memory every copy has memory pages of its own. CUDA pins whole pages and refuses those that are pinned
  already, and malloc puts small tensors on the pages of their neighbours.
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
        pinned: whether that memory is pinned; needs CUDA.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self._stager = _PinnedStager() if pinned else StateDictStager()

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """The copy; valid until the next call, which fills the same memory."""
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
    """Pinned host memory that begins with a page and shares none."""
    # Anonymous and shared: a fork, of a loader worker say, leaves the pages where CUDA found them.
    storage = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()
    pin_memory_utils.pin_memory(storage.data_ptr(), storage.nbytes())
    unpin = weakref.finalize(storage, pin_memory_utils.unpin_memory, storage.data_ptr())
    unpin.atexit = False  # CUDA may be gone by then
    return storage
