# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Objectives (loss and sampling of each), timestep distributions, samplers and guidance; no ranks, no runs.

May import: config, models, randomness, registry.
"""
