# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run other implementations in a separate process, if they are installed. The project does not depend on them.

To run these comparisons, install the references without what they require, next to the environment, not into it:
```
pip install --no-deps --target /tmp/references torch-fidelity efficientnet-lite-pytorch
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

BEFORE = """
import importlib.abc
import importlib.machinery
import sys
import types
import torch

def empty_class(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})

class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # The references import torchvision for data sets and other networks, which these tests do not touch.
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = empty_class
        return module

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, StandIn())
given = torch.load(sys.argv[1])
"""


def run_reference(package: str, script: str, given: Any, *, folder: Path) -> Any:
    """What `script` assigns to `result`, computed from `given`; both are what `torch.save` and `torch.load` take."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed; tests/extras/evaluation/references.py says how to install it for this test"
        )
    torch.save(given, folder / "given.pt")
    files = [str(folder / name) for name in ("given.pt", "result.pt")]
    whole = BEFORE + script + "\ntorch.save(result, sys.argv[2])\n"
    subprocess.run([sys.executable, "-c", whole, *files], check=True)
    return torch.load(files[1])
