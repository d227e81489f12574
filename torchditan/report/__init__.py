# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reports with tables, plots and findings for ablation grids (report.py) and for compared runs (compare.py).

May import: ablation, config, finetune, run.
"""
