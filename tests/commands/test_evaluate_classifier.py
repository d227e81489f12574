# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan evaluate --metrics classifier` on a trained run: its figures on stdout, its progress on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cards
import pytest

from torchditan.run import progress

if TYPE_CHECKING:
    from tests.conftest import RunScript
    from tests.zoo import Zoo


def test_it_counts_the_classes_that_a_classifier_recognises_and_says_how_far_it_is_on_stderr(
    zoo: Zoo, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    run = zoo("digits")
    outcome = run_script("torchditan", "evaluate", run, "--num_samples=20", "--epochs=4", "--out=out")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("| figure")
    report = cards.values(outcome)
    assert (report["step"], report["num_samples"], report["chance"]) == (6, 20, 0.1)
    assert list(report["per_class"]) == list("0123456789")
    assert 0 <= report["accuracy_generated"] <= 1
    assert report["accuracy_held_out_real"] > 0.5, "the classifier learns the real images"
    for what in (f"loading {run}: ", "training the classifier: ", "drawing 20 samples: "):
        assert any(line.startswith(what) for line in outcome.err.splitlines()), what
