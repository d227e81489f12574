# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published models, captions, LoRA and its export, int8 base weights, export of whole pipelines.

The core never imports this package. A registry or a script imports it when an option asks for it.

May import: autoencoders, config, data_stream, distributed, evaluation, job, latents, models, randomness,
registry, run, weights.
"""
