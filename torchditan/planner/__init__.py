# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Estimates memory and time of a run without its device: `python -m torchditan.planner`, docs/planner.md.

plan.py combines the traced step (trace.py), memory.py and step_time.py.

May import: config, diffusion, distributed, finetune, job, models, optim, registry, run, supervision.
"""
