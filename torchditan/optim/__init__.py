# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Optimizers by parameter groups, learning-rate schedule, gradient clipping, EMA, divergence guard, loss scaling."""
