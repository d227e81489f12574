# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Draws are a function of (seed, purpose, index) alone."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch

from torchditan.randomness import IndexedGenerator, Permutation, draw, generator, name_to_index, uniform


def test_a_sample_draws_the_same_in_any_batch() -> None:
    together = draw(0, [7, 3, 11], (2, 4, 4))
    alone = draw(0, [3], (2, 4, 4))
    for name in ("noise", "timestep", "label_dropout"):
        assert torch.equal(getattr(together, name)[1:2], getattr(alone, name)), name
    assert together.keys() == {"noise", "timestep", "label_dropout"}


def test_the_posterior_has_noise_of_its_own() -> None:
    randomness = draw(0, [3, 7], (4, 8, 8), {"noise": "normal", "posterior": "normal"})
    assert abs(torch.corrcoef(torch.stack([randomness.noise.flatten(), randomness["posterior"].flatten()]))[0, 1]) < 0.2
    assert torch.equal(randomness.noise, draw(0, [3, 7], (4, 8, 8)).noise)


def test_seed_purpose_and_index_each_change_the_draw() -> None:
    first = generator(0, "noise", 5).random(4)
    for other in (generator(1, "noise", 5), generator(0, "timestep", 5), generator(0, "noise", 6)):
        assert not (first == other.random(4)).any()


def test_one_generator_aimed_at_many_indices_draws_what_many_would() -> None:
    aimed = IndexedGenerator(3, "noise")
    aimed.at(2).random(5, dtype=np.float32)  # an odd number of 32-bit draws leaves half a word behind
    for index in (7, 0, 2**62, 7):
        assert (aimed.at(index).standard_normal(9) == generator(3, "noise", index).standard_normal(9)).all()


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


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_a_permutation_shows_every_number_once(length: int) -> None:
    shuffled = Permutation(0, "shuffle", 0, length=length)(np.arange(length))
    assert sorted(shuffled.tolist()) == list(range(length))


def test_every_order_of_a_few_is_as_likely() -> None:
    orders = Counter(tuple(Permutation(seed, "shuffle", 0, length=3)(np.arange(3)).tolist()) for seed in range(1200))
    assert len(orders) == 6
    assert all(150 < count < 250 for count in orders.values())  # 200 expected, standard deviation 13


def test_a_permutation_keeps_no_neighbours_and_no_places() -> None:
    positions = np.arange(20_000)
    first, second = (Permutation(0, "shuffle", epoch, length=20_000)(positions) for epoch in (0, 1))
    for left, right in ((first, positions), (first, second), (first[1:], first[:-1])):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.03  # 4 standard deviations
    assert (first == positions).sum() < 10  # one expected
    assert (np.diff(first) == 1).sum() < 10


def test_a_permutation_takes_no_memory_however_long_it_is() -> None:
    tracemalloc.start()
    shuffle = Permutation(0, "shuffle", 5, length=10**9)
    assert shuffle(np.arange(256)).min() >= 0 and shuffle(np.arange(256)).max() < 10**9
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


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
