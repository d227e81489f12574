# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""An emulated GPU counts kernels and memory and computes nothing. `EMULATED_GPU=1` says that tests run on one."""

from __future__ import annotations

import os

import pytest

IS_EMULATED = os.environ.get("EMULATED_GPU") == "1"


def skip_if_emulated(reason: str = "its results are zero") -> None:
    """End a test before it checks what an emulated GPU does not have. What the test did so far has run on the GPU."""
    if IS_EMULATED:
        pytest.skip(f"an emulated GPU: {reason}")
