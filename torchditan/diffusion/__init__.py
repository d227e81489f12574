# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Objectives (loss and sampling of each), timestep distributions, samplers and guidance.

Imports `config` for option checks and `registry`; nothing here knows of ranks, the trainer or a run's logs.
"""
