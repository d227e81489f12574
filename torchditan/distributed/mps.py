# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What training on an Apple GPU (torch's MPS) refuses.

Notable:
- an Apple GPU trains in one process and without torch.compile, by default in float32: the path of the quickstart;
- nothing here has run on Apple hardware.
"""

from __future__ import annotations

from typing import Any

from torchditan.config.options import Config, flatten
from torchditan.errors import option_error

_SUPPORTED: dict[str, tuple[Any, str]] = {
    "training.mixed_precision_reduce": ("float32", "is for several ranks, and MPS trains in one process"),
    "training.attention_backend": ("default", "chooses between kernels of CUDA; must be default on MPS"),
    "training.enable_cpu_offload": (False, "MPS lacks the streams of fully_shard; leave it out"),
    "training.deterministic": (False, "is not promised by the kernels of MPS; leave it out"),
    "training.compile": (False, "torch.compile for MPS is a prototype, and was not tested here; leave it out"),
    "float8.enable_float8_linear": (False, "an Apple GPU has no float8 products; leave it out"),
    "checkpoint.async_mode": ("disabled", "was not tested on MPS; must be disabled"),
    "profiling.enable_profiling": (False, "torch's profiler does not see the kernels of MPS; leave it out"),
    "profiling.enable_memory_snapshot": (False, "needs CUDA, this run is on mps; leave it out"),
}
"""The supported value of each option that MPS limits, and what is right instead of another value."""


def check_mps(config: Config) -> None:
    """Refuse what MPS does not support.

    Raises:
        ConfigError: an option has a value that MPS does not support.
    """
    options = flatten(config)
    for option, (supported, right) in _SUPPORTED.items():
        if options[option] != supported:
            raise option_error(option, options[option], right)
