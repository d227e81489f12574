# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reports as one page with plots: runs (run_page.py) and ablation grids (grid_page.py); sampling sweeps as a table with
plots (sweep_folder.py).

May import: ablation, config, evaluation, finetune, run.
"""
