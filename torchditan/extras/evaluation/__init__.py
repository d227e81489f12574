# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Validation loss, sample grids, and measures of generated or reconstructed images.

May import: config, data_stream, diffusion, distributed, latents, models, randomness, registry, run.
"""
