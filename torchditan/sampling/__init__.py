# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Sampling during training and after it: drawings, the sampler, grids, and the validation loss."""
