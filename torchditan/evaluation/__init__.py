# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Validation loss, sample grids, and measures of generated or reconstructed images.

The trainer imports validation and sample grids; reconstruction.py and classifier.py are imported where an option asks.
"""
