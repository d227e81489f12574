# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Looking at what a model generates, beside the real images."""
