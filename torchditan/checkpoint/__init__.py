# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoints: contents (run_state.py), writing (manager.py), loading (loading.py), and files on disk (files.py)."""
