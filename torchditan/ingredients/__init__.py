# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Optional recipes without a measured gain here (docs/recipes.md), each one file on the extension points.

Only registry.py names them: a job imports one when an option asks for it.

May import: config, diffusion, models, randomness.
"""
