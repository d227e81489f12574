# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Import optional libraries at first use, without their own log messages and warnings."""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType

from torchditan.errors import ConfigError


def how_to_install(extra: str) -> str:
    """The command that installs an extra, in any folder: pip finds its packages in the installed metadata."""
    return f"pip install 'torchditan[{extra}]'"


def import_optional(module: str, *, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Raises:
        ConfigError: the package is missing; the message contains the extra that installs it.
    """
    for library in ("DIFFUSERS", "TRANSFORMERS"):  # read during their import
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):  # diffusers imports torchao, which warns about its missing parts
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the package {module.split('.')[0]} is missing: {how_to_install(extra)}") from error
