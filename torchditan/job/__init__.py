# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From options to a training job: complete and check the options (prepare.py, complete.py). trainer.py builds it."""
