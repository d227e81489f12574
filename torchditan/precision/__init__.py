# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Precisions below bfloat16."""
