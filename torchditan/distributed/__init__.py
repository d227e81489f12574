# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Process group, mesh and the one `parallelize` that serves every model."""
