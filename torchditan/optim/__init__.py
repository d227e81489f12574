# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Optimizers by parameter groups, the learning-rate schedule, EMA, divergence guard, loss scaling.

Imports `config` and `registry`.
"""
