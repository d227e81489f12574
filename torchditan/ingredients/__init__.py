# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Optional recipes without a measured gain here (docs/recipes.md), each one file on the extension points.

Only registry.py names them: a job imports one when an option asks for it. To remove them, delete this folder,
tests/ingredients/, their lines in registry.py and their sections in docs/; no other test needs them.

May import: config, diffusion, models, randomness.
"""
