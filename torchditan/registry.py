# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the value of an option stands for. One line here adds an objective, a block or an optimizer (docs/extending.md).

A line says `"value": "module:name"`. The module is imported when a job asks for that value, so this file imports no
torch, and config/options.py takes the choices of its options from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

OBJECTIVES = {
    "flow_matching": "torchditan.diffusion.flow_matching:FlowMatching",
    "ddpm": "torchditan.diffusion.ddpm:DDPM",
}
"""`diffusion.objective`: classes that follow `torchditan.diffusion.objectives.Objective`."""

BLOCKS = {
    "dit": "torchditan.models.dit:DiTBlock",
}
"""`model.block`: subclasses of `torchditan.models.dit.Block`."""

OPTIMIZERS = {
    "AdamW": "torchditan.optim.optimizers:adamw",
    "AdamW8bit": "torchditan.optim.optimizers:adamw_8bit",
}
"""`optimizer.name`: functions from the `[optimizer]` options to a list of `ParameterGroup` (optim/optimizers.py)."""


def registered(registry: Mapping[str, str], name: str) -> Any:
    """The class or function that a registry has under this name."""
    module, _, attribute = registry[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
