# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Captioned images, encoded once: text encoders, the cache, and the dataset that reads from the cache."""
