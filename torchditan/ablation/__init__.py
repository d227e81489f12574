# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Ablations: a grid file (grid.py), its runs (runner.py, launch.py), and one ledger (ledger.py).

autotune.py searches the batch size. `python -m torchditan.ablation run GRID.toml`; see docs/ablations.md.
Imports the core and `planner`.
"""
