#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run a script of the project with the code of an entry: `python speedrun/launch.py REGISTRY CODE train.py --flags`.

REGISTRY is JSON, CODE a copy of the entry's file or an empty text; run.py makes both.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entries import register

if __name__ == "__main__":
    lines, code, script, *arguments = sys.argv[1:]
    register(json.loads(lines), Path(code) if code else None)
    path = Path(__file__).resolve().parents[1] / script
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
