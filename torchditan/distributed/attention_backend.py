# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The kernel of `F.scaled_dot_product_attention` that a run prefers (`training.attention_backend`).

Notable:
- a backend is a preference: calls that it cannot compute, for their mask or their size, use the next one of `BACKENDS`;
- torch's caches of compiled code do not know this setting of the process, although a graph contains the kernel that was
  chosen while it was traced. The backend therefore becomes part of their key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.compiler.config as compiler_config
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS: dict[str, Any] = {  # torch's type of them is incomplete
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Each with what replaces it where it cannot compute a call: the following ones, in this order."""


@contextmanager
def preferring(backend: str) -> Iterator[None]:
    """Attention by this backend inside the body, or by a following one where it cannot compute a call.

    Earlier ones are disabled: torch puts cuDNN first on some GPUs, and priorities alone may not change that.
    """
    names = list(BACKENDS)
    enabled = [BACKENDS[name] for name in names[names.index(backend) :]]
    tag = f"{compiler_config.cache_key_tag}attention:{backend}"
    with sdpa_kernel(enabled, set_priority=True), compiler_config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield
