# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reports: the tables, plots and sentences of ablation grids (report.py) and of compared runs (compare.py).

Imports `ablation`'s ledger and grids, and run directories.
"""
