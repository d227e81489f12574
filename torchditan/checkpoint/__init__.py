# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoints: contents (run_state.py), writing (manager.py), loading (loading.py), files on disk (files.py),
and weights for a model outside training (trained_weights.py).

May import: config, models, optim, registry, run, supervision.
"""
