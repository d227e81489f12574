# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""speedrun/run.py: what it runs, writes, keeps and refuses. The scripts that it calls are tested elsewhere."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import entries
import pytest

from torchditan.errors import ConfigError

pytestmark = pytest.mark.nightly

SCRIPT = Path(entries.__file__).parent / "run.py"
_SPEC = importlib.util.spec_from_file_location("speedrun_run", SCRIPT)
assert _SPEC is not None
assert _SPEC.loader is not None
run = importlib.util.module_from_spec(_SPEC)
sys.modules["speedrun_run"] = run
_SPEC.loader.exec_module(run)


class Scripts:
    """In place of train.py and the command `evaluate`: writes what they write."""

    def __init__(self, *, evaluations: int = 32) -> None:
        self.evaluations = evaluations
        self.calls: list[tuple[str, list[str]]] = []

    def __call__(self, trial: Any, script: str, arguments: list[str]) -> None:
        self.calls.append((script, arguments))
        folder = trial.run
        folder.mkdir(parents=True, exist_ok=True)
        if script == "train":
            rows = [
                {"step": 10, "loss": 0.5, "tflops_per_device": 2.0, "step_time_s": 0.5, "images_seen": 640},
                {
                    "step": 14,
                    "loss": 0.4,
                    "tflops_per_device": 1.0,
                    "step_time_s": 1.0,
                    "images_seen": 896,
                    "elapsed_s": 7.5,
                },
            ]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
            stored = {
                "hardware": {"cpu": "a cpu"},
                "versions": {},
                "git_commit": "abc",
                "created": "2026-11-22T10:00:00",
            }
            (folder / "config.json").write_text(json.dumps(stored))
            (folder / "status.json").write_text(json.dumps({"state": "completed"}))
        else:
            out = Path(next(flag for flag in arguments if flag.startswith("--out=")).removeprefix("--out="))
            out.mkdir(parents=True)
            figures = {figure: {"value": 50.0 + i} for i, figure in enumerate(run.FIGURES.values())}
            card = {"figures": figures, "model_evaluations": self.evaluations, "model_parameters": 9, "sampling": {}}
            card["step"] = trial.entry.num_steps
            (out / "card.json").write_text(json.dumps(card))


def trials(tmp_path: Path, *arguments: str) -> list[Any]:
    places = ["--outputs", str(tmp_path / "outputs"), "--results", str(tmp_path / "results")]
    return run.parse(["official_dit", *arguments, *places])[1]


def test_a_result_has_all_that_a_reader_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_call", scripts := Scripts())
    (trial,) = trials(tmp_path, "--seeds", "2")
    result = run.make(trial)
    assert json.loads((tmp_path / "results/official_dit/seed-2.json").read_text()) == result
    assert result["training_flops"] == 10 * 1e12 + 4 * 1e12
    assert (result["steps"], result["images"], result["last_loss"], result["training_seconds"]) == (14, 896, 0.4, 7.5)
    assert result["figures"]["fd"] == 50
    assert result["definition"] == json.loads(json.dumps(entries.load("official_dit").definition()))
    assert [script for script, _ in scripts.calls] == ["train", "evaluate"]
    assert {"--num_samples=2048", "--seed=0", "--metrics=effnet", "--sampling.num_steps=32"} < {*scripts.calls[1][1]}
    run.make(trial)
    assert len(scripts.calls) == 2, "a result that exists is not made again"
    first, second = capsys.readouterr().out.splitlines()
    assert first == "seed-2.json: FD-EffNetLite0 50.00"
    assert second == f"{trial.result_path} exists; to repeat it: --check, or delete it"


def test_a_changed_entry_is_trained_anew_and_its_old_result_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_call", scripts := Scripts())
    (trial,) = trials(tmp_path)
    run.make(trial)
    changed = replace(trial, entry=replace(trial.entry, settings={**trial.entry.settings, "optimizer.lr": 5e-3}))
    with pytest.raises(ConfigError, match=r"seed-0\.json was made with an older version of official_dit; delete it"):
        run.make(changed)
    trial.result_path.unlink()
    run.make(changed)
    assert [script for script, _ in scripts.calls].count("train") == 2


def test_a_check_repeats_a_committed_result_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_call", scripts := Scripts())
    (committed,) = trials(tmp_path)
    again = trials(tmp_path, "--check")
    with pytest.raises(ConfigError, match="no committed result of official_dit, seed 0; leave --check out"):
        run.check(again, tmp_path / "results", jobs=1)
    run.make(committed)
    for _ in range(2):  # a finished check starts anew
        assert run.check(again, tmp_path / "results", jobs=1)
    assert [script for script, _ in scripts.calls].count("train") == 3
    path = committed.result_path
    result = json.loads(path.read_text())
    result["figures"]["fd"] *= 1.05
    path.write_text(json.dumps(result))
    assert not run.check(again, tmp_path / "results", jobs=1)
    assert "of the committed one: DIFFERS" in capsys.readouterr().out
