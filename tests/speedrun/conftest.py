# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The speedrun is a folder of scripts, not a package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "speedrun"))
