# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Ablations: one grid file in (grid.py), runs (runner.py, launch.py), one ledger out (ledger.py).

Batch sizes are found by search (autotune.py). `python -m torchditan.ablation run GRID.toml`; see docs/ablations.md.
"""
