# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The Python blocks of docs/checkpoints.md run in order, as a user would type them, with a smaller training run.

The first is the list of stable imports, which the others use.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parents[2]
SMALLER = '"--training.steps=2", "--training.batch_size=4", "--training.global_batch_size=4", '
SMALLER += '"--model.flavor=debugmodel", "--sampling.num_steps=2", "--validation.num_images=4"'

KEYWORDS = """steps=2, batch_size=4, global_batch_size=4, flavor="debugmodel", num_images=4,
    **{"sampling.num_steps": 2}"""


def test_the_examples_of_the_python_page_run(tmp_path: Path, run_script: RunScript) -> None:
    page = (REPOSITORY / "docs" / "checkpoints.md").read_text(encoding="utf-8").partition("\n## Python\n")[2]
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    assert "steps=600" in blocks[1] and '"--training.steps=600"' in blocks[2]
    blocks[1] = blocks[1].replace("steps=600", KEYWORDS)
    blocks[2] = blocks[2].replace('"--training.steps=600"', SMALLER)
    blocks[3] += "assert losses.mean() < 1, losses.mean()  # 1.7 at first\n"
    blocks.append("assert run.sample(classes=[3], seed=0).shape == (1, 1, 8, 8)\nassert losses[-1][0] == 2, losses\n")
    blocks.append("raise SystemExit(0)\n")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    run = run_script(str(script))
    assert run.code == 0, run.err
    assert "torch.Size([80, 1, 8, 8])" in run.out
    assert "torch.Size([2, 4, 1, 8, 8])" in run.out
    assert "completed 2" in run.out
    assert (tmp_path / "grid.png").stat().st_size > 0
    assert (tmp_path / "sample.png").stat().st_size > 0
