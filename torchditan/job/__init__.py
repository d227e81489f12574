# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A job before the training starts: complete and check its settings (prepare.py, complete.py), then build its parts (build.py).

optional_parts.py chooses what only some jobs need, by name. Imports the core; only train.py, the scripts and the trainer import it.
"""
