# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoints: writing (manager.py), loading (loading.py), files on disk (files.py), those of one run.

May import: config, data_stream, models, optim, run, supervision.
"""
