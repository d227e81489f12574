# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Weights at any address (opening.py): a trained model (trained_model.py), export, import, sharing."""
