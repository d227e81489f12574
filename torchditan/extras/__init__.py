# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the core does without: published models, captions, evaluation, sharing, planner, ablations, reports.

The core never imports it; registry.py names it. `torchditan.load` and `torchditan.train` open it when they are called.
"""
