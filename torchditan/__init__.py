# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""TorchDiTan: pretraining diffusion transformers, from a laptop CPU to a node of GPUs.

Importing this package imports no other module; import the folders you need.
"""

from __future__ import annotations

__version__ = "0.1.0"
