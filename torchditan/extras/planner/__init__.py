# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Estimates the memory of a run without its device, and bounds its time: docs/ablations.md.

`python -m torchditan.planner` prints a plan. plan.py combines the traced step (trace.py), memory.py and step_bound.py.
batch_size.py finds the largest batch size, also for the autotuner.
"""
