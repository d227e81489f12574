# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""TorchDiTan: pretraining diffusion transformers, from a laptop CPU to a node of GPUs.

`train` trains a configuration, `load` opens a trained run (docs/checkpoints.md). For all else, import the folders you
need. Importing this package imports no other module; torch follows with the first use of `train` or `load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.3.0"
__all__ = ["load", "train"]

if TYPE_CHECKING:
    from torchditan.extras.weights.trained_model import load
    from torchditan.training import train
else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            from torchditan.distributed.cpu_threads import limit_spinning

            limit_spinning()  # before torch, which follows now
        if name == "load":
            from torchditan.extras.weights.trained_model import load

            return load
        if name == "train":
            from torchditan.training import train

            return train
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
