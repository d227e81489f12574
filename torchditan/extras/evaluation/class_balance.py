# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The classes of the samples of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchditan.errors import option_error
from torchditan.randomness import Permutation, uniform

ClassBalance = Literal["data", "balanced", "random"]
"""Classes of samples: "data" has each class as often as the training images, "balanced" each equally often, and
"random" draws the class of each sample uniformly, as ADM's and DiT's scripts do."""


def order_of_classes(
    num_samples: int,
    *,
    num_classes: int,
    class_balance: ClassBalance,
    class_counts: Sequence[int] | None,
    seed: int,
) -> Tensor:
    """Choose the classes of the samples of an evaluation: (num_samples,) int64, in random order.

    With "data" and "balanced", the number of samples of each class is exact: its share of `num_samples`, rounded down,
    and one more for the classes with the largest remainders. The seed decides between equal remainders. With "random",
    the counts vary as those of independent draws do.

    Args:
        num_classes: 0 for a model without classes, whose samples have one row.
        class_balance: see `ClassBalance`; ignored without classes.
        class_counts: training images of each class; None if they are not known.

    Raises:
        ConfigError: "data" lacks the class counts.
    """
    if not num_classes:
        return torch.zeros(num_samples, dtype=torch.int64)
    if class_balance == "random":
        draws = uniform(seed, "sample_class", range(num_samples)).double()  # sample i's depends on (seed, i)
        return (draws * num_classes).long()
    shares = np.ones(num_classes, dtype=np.int64)
    if class_balance == "data":
        if not class_counts or not sum(class_counts):
            right = "this dataset does not know how many images each class has; must be balanced or random"
            raise option_error("--class_balance", class_balance, right)
        shares = np.array(class_counts)  # the last classes may have no image
    counts, remainders = np.divmod(num_samples * shares, shares.sum())
    tie_break = Permutation(seed, "sample_remainders", 0, length=len(shares))(np.arange(len(shares)))
    counts[np.lexsort((tie_break, -remainders))[: num_samples - counts.sum()]] += 1
    order = Permutation(seed, "sample_order", 0, length=num_samples)(np.arange(num_samples))
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts)[order])
