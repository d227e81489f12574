# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Weights outside of checkpoints: export, import, and opening a trained run (trained_model.py).

Imports the core; the core does not import it.
"""
