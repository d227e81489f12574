# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reports: tables, plots and sentences of ablation grids (report.py) and of compared runs (compare.py).

May import: ablation, config, finetune, run.
"""
