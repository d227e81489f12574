# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Draws are a function of (seed, purpose, index) alone."""

from __future__ import annotations

import torch

from torchditan.randomness import draw, generator, name_to_index


def test_a_sample_draws_the_same_in_any_batch() -> None:
    together = draw(0, [7, 3, 11], (2, 4, 4))
    alone = draw(0, [3], (2, 4, 4))
    for batch, single in zip(together, alone, strict=True):
        assert torch.equal(batch[1:2], single)


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
    for uniform in (randomness.timestep, randomness.label_dropout):
        assert 0 <= uniform.min() < uniform.max() < 1
        assert abs(uniform.mean() - 0.5) < 0.02
    assert not torch.equal(randomness.timestep, randomness.label_dropout)


def test_draws_stay_what_they_were() -> None:
    # Another value here means that every run and checkpoint of before continues differently.
    assert draw(0, [1], (2,)).noise[0].tolist() == KNOWN_NOISE
    assert name_to_index("blocks.0.attn.qkv.weight") == KNOWN_INDEX


KNOWN_NOISE = [0.6050183773040771, -0.6830394268035889]
KNOWN_INDEX = 12782861566576958939
