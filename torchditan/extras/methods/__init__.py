# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Methods on top of the core, one per file, each named in registry.py."""
