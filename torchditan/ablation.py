# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`python -m torchditan.ablation`, which scripts call. The code is in extras/ablation/."""

import sys

from torchditan.extras.ablation.__main__ import main
from torchditan.supervision.exit_status import run_job

if __name__ == "__main__":
    sys.exit(run_job(main))
