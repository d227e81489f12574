# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reports with tables, plots and findings: ablation grids (report.py), compared runs (compare.py) and sampling sweeps
(sweep_folder.py).

May import: ablation, config, evaluation, finetune, run.
"""
