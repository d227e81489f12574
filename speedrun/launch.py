#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run a command of `torchditan`, or a script of the repository, with the code of an entry:
`python speedrun/launch.py REGISTRY CODE evaluate --flags`.

REGISTRY is JSON, CODE a copy of the entry's file or an empty text; run.py makes both.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entries import register

from torchditan.__main__ import main

if __name__ == "__main__":
    lines, code, name, *arguments = sys.argv[1:]
    register(json.loads(lines), Path(code) if code else None)
    if name.endswith(".py"):
        path = Path(__file__).resolve().parents[1] / name
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")
    else:
        sys.argv = ["torchditan", name, *arguments]
        sys.exit(main())
