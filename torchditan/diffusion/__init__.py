# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Objectives, timestep distributions, samplers and guidance; nothing here knows of ranks or configs."""
