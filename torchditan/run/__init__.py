# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files and reports of a run: run directory, metrics, trackers, progress lines, profiles, provenance, the hub."""
