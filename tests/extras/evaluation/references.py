# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run other implementations in a separate process, if they are installed. The project does not depend on them.

To run these comparisons, install the references without what they require, next to the environment, not into it:
```
pip install --no-deps --target /tmp/references torch-fidelity torchmetrics lightning-utilities efficientnet-lite-pytorch
PYTHONPATH=/tmp/references pytest tests/extras/evaluation
```
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOREIGN = Path(__file__).parents[2] / "foreign"
BEFORE = """
import sys
import torch

sys.path.append(sys.argv[3])
import foreign_suite

# The references import it for data sets and other networks, which these tests do not touch.
foreign_suite.stand_in_for(["torchvision"])
given = torch.load(sys.argv[1])
"""


def run_reference(package: str, script: str, given: Any, *, folder: Path) -> Any:
    """What `script` assigns to `result`, computed from `given`; both are what `torch.save` and `torch.load` take."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; tests/extras/evaluation/references.py says how to install it for this test")
    torch.save(given, folder / "given.pt")
    files = [str(folder / name) for name in ("given.pt", "result.pt")]
    whole = BEFORE + script + "\ntorch.save(result, sys.argv[2])\n"
    subprocess.run([sys.executable, "-c", whole, *files, str(FOREIGN)], check=True)
    return torch.load(files[1])
