# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Ablations: a grid file (grid.py), its runs (runner.py, launch.py) and one ledger (ledger.py). See docs/ablations.md.

autotune.py searches the batch size of one run.
"""
