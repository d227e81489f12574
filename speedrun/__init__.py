# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The open speedrun (README.md): `torchditan speedrun` in a checkout. No wheel contains it."""
