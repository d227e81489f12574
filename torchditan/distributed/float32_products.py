# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""IEEE float32 for parts of a run whose `training.float32_matmul_precision` is lower.

Notable: torch's settings are process-wide. `torch.set_float32_matmul_precision` sets that of products;
convolutions on a GPU are in TF32 by default, whatever that precision is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BACKENDS: Any = torch.backends  # torch has no types for these
_PRODUCTS = (_BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul)
_CONVOLUTIONS = (_BACKENDS.cudnn.conv, _BACKENDS.mkldnn.conv)


@contextmanager
def ieee_float32(*, convolutions: bool = False) -> Iterator[None]:
    """Compute matrix products of float32 tensors in IEEE float32 inside the body, and convolutions too if asked."""
    operations = (*_PRODUCTS, *_CONVOLUTIONS) if convolutions else _PRODUCTS
    before = [operation.fp32_precision for operation in operations]
    try:
        for operation in operations:
            operation.fp32_precision = "ieee"
        yield
    finally:
        for operation, precision in zip(operations, before, strict=True):
            operation.fp32_precision = precision
