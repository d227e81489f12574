# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoints: writing and loading (manager.py), files on disk (files.py), those of one run (run_checkpoints.py).

Imports `config`, `optim`, `run` and `supervision`; nothing optional.
"""
