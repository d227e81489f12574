#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run a script of the project with the code of an entry: `python speedrun/launch.py ENTRY train.py --flags`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entries import load

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    name, script, *arguments = sys.argv[1:]
    load(name).register()
    path = ROOT / script
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
