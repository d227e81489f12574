# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Ratios of step times: the rule of the ratio, and two real workers that take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from speedrun import entries, step_times
from torchditan.errors import ConfigError

pytestmark = pytest.mark.nightly


def test_a_steady_ratio_is_its_median_and_a_noisy_one_is_not_reported() -> None:
    assert step_times.ratio_of([1.0, 1.1, 1.2, 1.1, 1.1])["ratio"] == 1.1
    assert step_times.ratio_of([1.0, 1.0, 1.5, 1.5, 1.0])["ratio"] is None


@pytest.mark.parametrize(("track", "name"), [("earth", "flow_matching"), ("laptop", "scenes")])
def test_two_entries_take_turns(track: str, name: str) -> None:
    track_of = entries.load_track(track)
    baseline, entry = entries.load(track_of, track_of.baseline), entries.load(track_of, name)
    found = step_times.measure(baseline, entry, turns=2, steps=2)
    assert len(found["seconds"]) == len(found["ratios"]) == 2
    assert all(seconds > 0 for turn in found["seconds"] for seconds in turn)
    wrong = replace(baseline, settings={**baseline.settings, "optimizer.lr": -1.0})
    with pytest.raises(ConfigError, match=r"its training failed: ConfigError: optimizer\.lr = -1\.0"):
        step_times.measure(baseline, wrong, turns=1, steps=1)
