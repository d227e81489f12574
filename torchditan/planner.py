# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`python -m torchditan.planner`, which scripts call. The code is in extras/planner/."""

import sys

from torchditan.extras.planner.__main__ import main
from torchditan.supervision.exit_status import run_job

if __name__ == "__main__":
    sys.exit(run_job(main))
