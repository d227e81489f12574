# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Options and what they declare (options.py), rules over several of them (rules.py), TOML files and flags (loader.py).

May import: registry, run.
"""

from torchditan.config.errors import ConfigError

__all__ = ["ConfigError"]  # which datasets of users raise under this name
