# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Options (options.py), their rules (rules.py), TOML files and flags (loader.py), legacy keys, the trajectory.

May import: registry.
"""
