# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Configuration: every option (options.py), the rules of their values (rules.py), loading and legacy keys.

trajectory.py lists the options that decide what a run learns. Imports only `torchditan.registry`.
"""
