# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Captioned images, encoded once: text encoders, and the dataset that reads from the cache that they fill."""
