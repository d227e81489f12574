# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From options to the parts of a training: complete and check them (prepare.py, complete.py), build (build.py).

optional_parts.py chooses by name what only some jobs need.

May import: checkpoint, config, data_stream, diffusion, distributed, evaluation, latents, models, optim, run,
supervision.
"""
