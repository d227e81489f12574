# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The training stream: dataset protocols (datasets.py), position -> sample (order.py), sample -> batch (loader.py).

streamed.py reads sources that have no random access. Imports `config`, `randomness` and the process handling of `supervision`.
"""
