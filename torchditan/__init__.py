# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""TorchDiTan: pretraining diffusion transformers, from a laptop CPU to a node of GPUs.

Notable: importing this package imports nothing else; each room is imported where it is used.
"""

from __future__ import annotations

__version__ = "0.1.0"
