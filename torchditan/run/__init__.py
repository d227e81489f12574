# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What a run writes and reports: run directory, metrics, trackers, progress lines, profiles, provenance.

May import: config.
"""
