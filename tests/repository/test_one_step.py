# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What you read to follow one training step of the quickstart: the files and functions that the step calls.

`pytest tests/repository/test_one_step.py -s` prints them. Lines are physical lines of functions, docstrings included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import RunAlone

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN_AND_TRACE = """
import inspect, json, runpy, sys
from torchditan.trainer import Trainer

calls = set()
train_step = Trainer.train_step

def trace(frame, event, argument):
    if event == "call":
        calls.add(frame.f_code)

def traced_step(trainer, batches):
    if trainer.progress.step + 1 == 2:  # the first step has set everything up
        sys.setprofile(trace)
    try:
        return train_step(trainer, batches)
    finally:
        sys.setprofile(None)

Trainer.train_step = traced_step
sys.argv = ["train.py", *sys.argv[1:]]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
functions = []
for code in calls:
    if "<" not in code.co_name and ("/torchditan/" in code.co_filename or "/data/" in code.co_filename):
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
        functions.append((code.co_filename, name, len(inspect.getsourcelines(code)[0])))
print(json.dumps(functions))
"""


def test_one_step_is_read_in_few_files(tmp_path: Path, run_alone: RunAlone) -> None:
    flags = ["--job.config_file=quickstart", "--training.steps=3", "--training.global_batch_size=4"]
    flags += ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--metrics.enable_sampling=false"]
    flags += ["--validation.freq=0", f"--job.dump_folder={tmp_path}"]
    script = tmp_path / "trace.py"
    script.write_text(TRAIN_AND_TRACE)
    files: dict[str, list[tuple[str, int]]] = {}
    for file, function, lines in sorted(json.loads(run_alone(script, *flags).splitlines()[-1])):
        if Path(file).is_relative_to(REPOSITORY):
            files.setdefault(Path(file).relative_to(REPOSITORY).as_posix(), []).append((function, lines))
    for file, functions in files.items():
        print(f"{file}: {sum(lines for _, lines in functions)} lines in {', '.join(name for name, _ in functions)}")
    whole = sum(len((REPOSITORY / file).read_text(encoding="utf-8").splitlines()) for file in files)
    called = sum(lines for functions in files.values() for _, lines in functions)
    print(f"one step calls {called} lines of functions in {len(files)} files of {whole} lines")
    # Ceilings: an ordinary step should not grow. 126 lines copy the weights to bfloat16 (replicate.py).
    assert called <= 820
    assert len(files) <= 20
