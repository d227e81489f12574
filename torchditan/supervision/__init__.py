# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Around the training: watchdog, lost ranks, stop requests, the exit status and its reason."""
