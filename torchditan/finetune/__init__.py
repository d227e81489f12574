# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published models, captions, LoRA and its export, int8 base weights, export of whole pipelines.

Imports the core and `autoencoders`; chosen by `registry`, `job.optional_parts` or a script.
"""
