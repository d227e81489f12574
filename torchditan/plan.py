# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`python -m torchditan.plan`: an older name of `python -m torchditan.planner`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("torchditan.planner", run_name="__main__", alter_sys=True)
