# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Options and what they declare (options.py), rules over several of them (rules.py), TOML and flags (loader.py)."""
