# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published training methods, one file each, as ingredients and parts that an option names (docs/recipes.md)."""
