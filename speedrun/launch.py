# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run a command of `torchditan` with the code of an entry: `python -m speedrun.launch REGISTRY CODE evaluate --flags`.

REGISTRY is JSON, CODE a copy of the entry's file or an empty text; run.py makes both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from speedrun.entries import register
from torchditan.__main__ import main

if __name__ == "__main__":
    lines, code, *words = sys.argv[1:]
    register(json.loads(lines), Path(code) if code else None)
    sys.argv = ["torchditan", *words]
    sys.exit(main())
