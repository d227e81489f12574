# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Objectives (loss and sampling), timestep distributions, samplers and guidance, independent of ranks and runs."""
