# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Records every operator of a step on the meta device: memory, traffic and FLOPs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FLASH_TILE = 128
_WITH_ACCUMULATOR = {"_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward"}


class StepRecorder(TorchDispatchMode):
    """Records for every operator the live bytes after it, the bytes it reads and writes, and its FLOPs."""

    def __init__(self, *, ignored: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.live_after: list[int] = []
        self.flops: list[int] = []
        self.reads: list[dict[int, int]] = []
        self.writes: list[dict[int, int]] = []
        self.is_product: list[bool] = []
        self.marks: dict[str, tuple[int, int]] = {}
        """(operators, bytes alive) so far, by label."""
        self._tokens: dict[int, int] = {}
        self._num_tokens = 0
        self._ignored = [tensor.untyped_storage() for tensor in ignored]
        self._finalizers: list[weakref.finalize] = []
        for storage in self._ignored:
            self._tokens[storage._cdata] = self._new_token()

    def mark(self, label: str) -> None:
        self.marks[label] = (len(self.live_after), self.live)

    def alive(self) -> set[int]:
        """Tokens of the live storages."""
        return set(self._tokens.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from torch.utils.flop_counter import flop_registry

        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = list_tensors(out)
        for tensor in made:
            self._track(tensor.untyped_storage())
        packet = func._overloadpacket
        name = packet.__name__
        formula = flop_registry.get(packet)
        is_attention = "scaled_dot_product" in name
        moves = not func.is_view and name not in _NO_KERNEL
        self.flops.append(int(formula(*args, **kwargs, out_val=out)) if formula else 0)
        self.reads.append(self._bytes(list_tensors((args, kwargs))) if moves else {})
        self.writes.append(self._bytes(made) if moves else {})
        self.is_product.append(name in _PRODUCTS or is_attention)
        self.live_after.append(self.live + (_attention_workspace(name, args) if is_attention else 0))
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._tokens:
            self._tokens[key] = self._new_token()
            self.live += storage.nbytes()
            self._finalizers.append(weakref.finalize(storage, self._forget, key, storage.nbytes()))

    def _forget(self, key: int, num_bytes: int) -> None:
        del self._tokens[key]
        self.live -= num_bytes

    def _new_token(self) -> int:
        self._num_tokens += 1
        return self._num_tokens

    def _bytes(self, tensors: list[torch.Tensor]) -> dict[int, int]:
        """Bytes of each storage that these tensors cover."""
        covered: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            token = self._tokens.get(storage._cdata)
            if token is not None:
                covered[token] = min(storage.nbytes(), covered.get(token, 0) + tensor.numel() * tensor.element_size())
        return covered


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
