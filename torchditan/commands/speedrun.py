# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The open speedrun, whose tracks, entries and results are in the folder speedrun/ of a checkout."""

from __future__ import annotations

import sys
from importlib import import_module

from torchditan.errors import ConfigError
from torchditan.run.provenance import checkout


def main() -> None:
    root = checkout()
    if root is None:
        raise ConfigError("torchditan speedrun needs a checkout of the repository, installed by pip install -e .")
    sys.path.insert(0, str(root))
    import_module("speedrun.run").main()
