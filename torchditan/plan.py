# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`python -m torchditan.plan`: an older name of `python -m torchditan.planner`."""

from __future__ import annotations

if __name__ == "__main__":
    from torchditan.planner.__main__ import main

    main()
