# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Draws are a function of (seed, purpose, index) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchditan.randomness import Permutation, draw, generator, name_to_index, uniform


def test_a_sample_draws_the_same_in_any_batch() -> None:
    together = draw(0, [7, 3, 11], (2, 4, 4))
    alone = draw(0, [3], (2, 4, 4))
    for name in ("noise", "timestep", "label_dropout"):
        assert torch.equal(getattr(together, name)[1:2], getattr(alone, name)), name
    assert together.keys() == {"noise", "timestep", "label_dropout"}


def test_seed_purpose_and_index_each_change_the_draw() -> None:
    first = generator(0, "noise", 5).random(4)
    for other in (generator(1, "noise", 5), generator(0, "timestep", 5), generator(0, "noise", 6)):
        assert not (first == other.random(4)).any()


def test_neighbouring_samples_do_not_share_their_noise() -> None:
    noise = draw(0, [0, 1], (3, 32, 32)).noise.flatten(1)
    assert abs(torch.corrcoef(noise)[0, 1].item()) < 0.08  # 4.4 standard deviations of 3,072 independent values
    assert not set(noise[0].tolist()) & set(noise[1, :100].tolist())


def test_distributions_are_normal_and_uniform() -> None:
    randomness = draw(3, list(range(4000)), (16,))
    assert abs(randomness.noise.mean()) < 0.02
    assert abs(randomness.noise.std() - 1) < 0.02
    for numbers in (randomness.timestep, randomness.label_dropout):
        assert 0 <= numbers.min() < numbers.max() < 1
        assert abs(numbers.mean() - 0.5) < 0.02
    assert not torch.equal(randomness.timestep, randomness.label_dropout)


@pytest.mark.parametrize("length", [1, 3, 16, 4097])
def test_a_permutation_shows_every_number_once(length: int) -> None:
    shuffled = Permutation(0, "shuffle", 0, length=length)(np.arange(length))
    assert sorted(shuffled.tolist()) == list(range(length))


def test_a_permutation_keeps_no_neighbours_and_no_places() -> None:
    positions = np.arange(20_000)
    first, second = (Permutation(0, "shuffle", epoch, length=20_000)(positions) for epoch in (0, 1))
    for left, right in ((first, positions), (first, second), (first[1:], first[:-1])):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.03  # 4 standard deviations
    assert (first == positions).sum() < 10  # one expected
    assert (np.diff(first) == 1).sum() < 10


def test_single_numbers_of_neighbours_purposes_and_seeds_are_independent() -> None:
    base = uniform(0, "timestep", range(40_000))
    others = (uniform(1, "timestep", range(40_000)), uniform(0, "flip", range(40_000)), base.roll(1), base.roll(64))
    for other in others:
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.02  # 4 standard deviations
    counts = torch.histc(base, bins=16, min=0, max=1)
    assert ((counts - 2500) ** 2 / 2500).sum() < 45  # chi-squared of 15 degrees of freedom: one in ten thousand


def test_draws_stay_what_they_were() -> None:
    # Another value here means that every run and checkpoint of before continues differently.
    assert draw(0, [1], (2,)).noise[0].tolist() == KNOWN_NOISE
    assert draw(0, [1, 2**40], (2,)).timestep.tolist() == KNOWN_TIMESTEPS
    assert Permutation(0, "shuffle", 1, length=100)(np.arange(5)).tolist() == KNOWN_ORDER
    assert name_to_index("blocks.0.attn.qkv.weight") == KNOWN_INDEX


KNOWN_NOISE = [0.6050183773040771, -0.6830394268035889]
KNOWN_INDEX = 12782861566576958939
KNOWN_ORDER = [6, 16, 90, 23, 38]
KNOWN_TIMESTEPS = [0.23255372047424316, 0.423481822013855]
