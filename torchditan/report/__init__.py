# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reports as one page with plots: runs (run_page.py) and ablation grids (grid_page.py); evaluations at several sampling
options as a table with a plot (sampling_table.py).

May import: ablation, config, evaluation, finetune, run.
"""
