# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What surrounds training: watchdog, lost ranks, stop requests, the exit status and its reason.

Imports `config` errors and `run`.
"""
