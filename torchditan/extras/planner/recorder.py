# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Records the live memory after every operator of a step on the meta device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FLASH_TILE = 128
_WITH_ACCUMULATOR = {"_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward"}


class StepRecorder(TorchDispatchMode):
    """Records for every operator the live bytes after it, without those of the `ignored` tensors."""

    def __init__(self, *, ignored: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.live_after: list[int] = []
        self.marks: dict[str, tuple[int, int]] = {}
        """(operators, bytes alive) so far, by label."""
        self._ignored = [tensor.untyped_storage() for tensor in ignored]  # kept, so that no other takes their place
        self._known = {storage._cdata for storage in self._ignored}
        self._finalizers: list[weakref.finalize] = []

    def mark(self, label: str) -> None:
        self.marks[label] = (len(self.live_after), self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in list_tensors(out):
            self._track(tensor.untyped_storage())
        name = func._overloadpacket.__name__
        self.live_after.append(self.live + _attention_workspace(name, args))
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live += storage.nbytes()
            self._finalizers.append(weakref.finalize(storage, self._forget, key, storage.nbytes()))

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.remove(key)
        self.live -= num_bytes


def list_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _attention_workspace(name: str, args: tuple[Any, ...]) -> int:
    """Bytes that the flash backward allocates internally: a float32 accumulator of dq, and the row sums.

    That of cuDNN, whose workspace is not published, is assumed to need the same.
    """
    if name not in _WITH_ACCUMULATOR:
        return 0
    batch, heads, tokens, head_dim = args[1].shape
    rows = -(-tokens // _FLASH_TILE) * _FLASH_TILE
    return 4 * batch * heads * rows * (-(-head_dim // 32) * 32 + 1)
