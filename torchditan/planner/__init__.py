# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Memory and time of a run before a device is there: `python -m torchditan.planner`; see docs/planner.md.

plan.py puts together the traced step (trace.py), memory.py and step_time.py. Imports the core, never a run.
"""
