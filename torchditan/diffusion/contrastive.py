# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Contrastive flow matching (Stoica et al. 2025, arXiv 2506.05350).

The paper's loss is |v - u|^2 - weight |v - u'|^2. Here v is the model's velocity, u = x - noise that of the sample, and
u' = x' - noise' that of its negative, another sample. The negative is unrelated to x_t and to the label, so for every
x_t, t and label the loss is smallest at

    v = (E[u | x_t, label] - weight mean(x)) / (1 - weight).

That is the velocity of flow matching, minus a constant, and longer by a factor of 1 / (1 - weight): 1.053 for a weight
of 0.05. Two things follow:

- an ideal model draws from another distribution than that of the data. As in the paper, samplers integrate v as it is.
  For samples with guidance the authors' script removes the bias, with (1 - weight) v + weight mean(x). Here samples are
  contrasted whether or not their label is dropped, so the bias of both predictions is the same, and also that of any
  guided one;
- the plain loss of an ideal model is not the smallest possible one. Compare runs by their samples too.
"""

from __future__ import annotations

import torch


def contrast(predicted: torch.Tensor, velocity: torch.Tensor, *, weight: float) -> torch.Tensor:
    """-weight |predicted - velocity of the negative|^2, averaged over the values of a sample, as a gradient alone.

    The value is 0, so that the training loss stays that of flow matching. Runs with and without the term compare, the
    loss stays positive, and loss spikes are found as before.

    The negative of stream position i is i XOR 1, its neighbour in the shuffled stream. A micro-batch has an even number
    of consecutive positions and starts at an even one, so it contains both (`Diffusion.batch_multiple`).

    Args:
        predicted: (B, ...) float32, the velocity of the model's prediction.
        velocity: (B, ...) float32, x - noise.
        weight: at least 0 and below 1; from 1 on, the loss has no minimum.

    Returns:
        (B,) float32, all 0.
    """
    negative = velocity.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    distance = weight * (predicted - negative).square().flatten(1).mean(1)
    return distance.detach() - distance
