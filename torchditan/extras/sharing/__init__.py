# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Sharing models and latents (an allow-list of options, a card, one folder), and datasets as WebDataset shards."""
