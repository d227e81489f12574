# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Opens the frozen networks of the objective (models/frozen.py), before the model is built."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torchditan.config.options import Config, cache_folder
from torchditan.data_stream.datasets import Batch, ImageDataset, images_of
from torchditan.diffusion.objectives import Objective
from torchditan.distributed.precision import precision_for
from torchditan.distributed.process_group import Rank
from torchditan.errors import option_error
from torchditan.models.frozen import FrozenNetwork, LookUp
from torchditan.run.progress import report_progress


@dataclass(frozen=True)
class OpenTargets:
    """What computes the targets of a batch."""

    online: dict[str, FrozenNetwork] = field(default_factory=dict)
    """Name in the batch -> network on the device, in bfloat16 where the device multiplies in it, else float32."""
    cached: dict[str, LookUp] = field(default_factory=dict)
    """Name in the batch -> what the loader reads, from the cache of results."""
    identities: dict[str, str] = field(default_factory=dict)
    """Network, as the user named it -> hash of its weights."""

    def compute(self, batch: Batch) -> Batch:
        """The targets of a batch on the device, which loses the `image` of its latents."""
        found = {name: network(images_of(batch)) for name, network in self.online.items()}
        batch.pop("image", None)
        return found


def open_targets(config: Config, objective: Objective, dataset: ImageDataset, *, rank: Rank) -> OpenTargets:
    """Open the networks of the objective's targets on the rank's device.

    Args:
        config: the completed configuration.
        dataset: training images.

    Raises:
        ConfigError: a network does not open, or the dataset has no images for it.
    """
    opened = OpenTargets()
    for name, target in objective.targets.items():
        is_encoded = config.autoencoder.is_given and not config.autoencoder.online
        if dataset.index is not None and dataset.index.images:
            dataset.with_image = True
        elif dataset.index is not None or is_encoded or dataset.sample_shape[0] not in (1, 3):
            right = (
                f"{target.network} reads images, and {dataset.name} holds latents without them; encode with --images, "
                "or at each step with --autoencoder.online; encoder=latents aligns with the latents themselves"
            )
            raise option_error("diffusion.ingredients", config.diffusion.ingredients, right)
        target.tensor  # noqa: B018  refuses what gives no features before weights are read
        with report_progress(f"opening {target.network}"):
            network = target.open(rank.device, getattr(torch, precision_for(rank.device)))
        opened.identities[target.network] = network.identity
        if not target.is_cached:
            opened.online[name] = network
            continue
        if not isinstance(dataset, ImageDataset):
            right = f"cannot cache the features of {dataset.name}, which is read in order; leave cache out"
            raise option_error("diffusion.ingredients", config.diffusion.ingredients, right)
        opened.cached[name] = target.fill_cache(
            dataset,
            network=network,
            flips=bool(config.dataset.horizontal_flip),
            folder=cache_folder(config) / "targets",
            rank=rank,
            timeout_seconds=config.comm.init_timeout_seconds,
        )
    return opened


def describe_targets(objective: Objective, *, flops_per_image: float) -> list[str]:
    """A line for each frozen network of the objective."""
    return [
        describe_frozen(t.network, t.num_parameters, None if t.is_cached else t.flops, flops_per_image)
        for t in objective.targets.values()
    ]


def describe_frozen(name: str | None, num_parameters: int, flops: int | None, flops_per_image: float) -> str:
    """A line: the size of a frozen network, and what it adds to a step. `flops` are of an image; None if cached."""
    size = f"{name}, frozen: {num_parameters / 1e6:,.1f}M parameters"
    if flops is None:
        return f"{size}, its results are cached"
    more = f"{flops / flops_per_image:.1%} on top of the FLOPs of a step; the MFU does not count them"
    return f"{size}, {flops / 2e9:.3g} GMAC an image, {more}"
