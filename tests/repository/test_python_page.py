# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The Python blocks of docs/python.md run in order, as a user would type them, with a smaller training run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SMALLER = '"--training.steps=2", "--training.batch_size=4", "--training.global_batch_size=4", '
SMALLER += '"--model.flavor=debugmodel", "--sampling.num_steps=2", "--validation.num_images=4"'

KEYWORDS = """steps=2, batch_size=4, global_batch_size=4, flavor="debugmodel", num_images=4,
    **{"sampling.num_steps": 2}"""


def test_the_examples_of_the_python_page_run(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 11
    assert "steps=600" in blocks[0] and '"--training.steps=600"' in blocks[2]
    blocks[0] = blocks[0].replace("steps=600", KEYWORDS)
    blocks[2] = blocks[2].replace('"--training.steps=600"', SMALLER)
    blocks[3] += "assert losses.mean() < 1, losses.mean()  # 1.7 at first\n"
    blocks.append("assert images.shape == (2, 1, 8, 8), images.shape\nassert losses[-1][0] == 2, losses\n")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "torch.Size([80, 1, 8, 8])" in run.stdout
    assert "torch.Size([2, 4, 1, 8, 8])" in run.stdout
    assert "completed 2" in run.stdout
    assert (tmp_path / "grid.png").stat().st_size > 0
    assert (tmp_path / "sample.png").stat().st_size > 0
