# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The training stream: dataset protocols (datasets.py), position -> sample (order.py), sample -> batch (loader.py);
and stored latents (stored_latents.py)."""
