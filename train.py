#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Train a diffusion transformer: `python train.py --job.config_file quickstart.toml` (several ranks: torchrun)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    from torchditan.__main__ import run

    sys.exit(run("train"))
