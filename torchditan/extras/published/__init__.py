# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published models by family (families.py), LoRA, and the int8 base under it."""
