# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Validation loss, sample grids, and measures of generated or reconstructed images."""
