# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The contents of a checkpoint: objects with torch's `state_dict` and `load_state_dict`, each registered once.

`Trainer.run_state` registers them in a `RunState`. To save another object with a run, implement the two methods and add
a line there. Saving, resuming and rolling back after a divergence then include it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from torchditan.models.saved_weights import saved_weights
from torchditan.optim.optimizers import optimizer_parts
from torchditan.run.training_progress import Progress


class Snapshot(NamedTuple):
    """The states at one step. The tensors are those of the run, not copies."""

    tensors: dict[str, dict[str, Any]]
    numbers: dict[str, int | float]
    per_rank: dict[str, dict[str, Any]]

    @property
    def step(self) -> int:
        return int(self.numbers["step"])


class RunState:
    """Every object that is saved with a run, in one of three groups. Objects that are None are left out.

    Args:
        progress: how far the run is; its step names the checkpoint. Stored with `numbers`.
        tensors: by name. Their states hold tensors, sharded or the same on all ranks. torch's distributed format
            stores them as `<name>.<key>`. A checkpoint that lacks one of them is refused.
        numbers: their states hold finite ints and floats below 2^63 in magnitude, the same on all ranks.
            `progress.json` stores them by key, so no two objects may use the same key. If a checkpoint lacks a
            key, loading it restores the value that the object had when it was registered.
        per_rank: by name. Their states differ between ranks and are stored as JSON, `<name>_rank0.json` and so on.
            An empty state is not written, and a rank without a file loads an empty one.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        tensors: Mapping[str, Stateful | None],
        numbers: Sequence[Stateful | None] = (),
        per_rank: Mapping[str, Stateful | None] | None = None,
    ) -> None:
        self.progress = progress
        self.tensors = {name: item for name, item in tensors.items() if item is not None}
        self.numbers: list[Stateful] = [progress, *(item for item in numbers if item is not None)]
        self.per_rank = {name: item for name, item in (per_rank or {}).items() if item is not None}
        self._first_numbers = [item.state_dict() for item in self.numbers]
        keys = [key for state in self._first_numbers for key in state]
        assert len(keys) == len(set(keys)), f"two registered objects store the same number: {sorted(keys)}"

    def snapshot(self) -> Snapshot:
        """The current states."""
        numbers = {key: value for item in self.numbers for key, value in item.state_dict().items()}
        per_rank = {name: item.state_dict() for name, item in self.per_rank.items()}
        return Snapshot(self.tensor_states(), numbers, per_rank)

    def tensor_states(self) -> dict[str, dict[str, Any]]:
        """The tensors of the run by name."""
        return {name: item.state_dict() for name, item in self.tensors.items()}

    def states_to_fill(self) -> dict[str, dict[str, Any]]:
        """The same for a load, which fills them in place: `load` then needs no second copy of any."""
        for item in self.tensors.values():
            if isinstance(item, OptimizerState):
                item.make()
        return self.tensor_states()

    def load(self, stored: Snapshot) -> None:
        """Restore every object from its stored state."""
        for name, item in self.tensors.items():
            item.load_state_dict(stored.tensors[name])
        for item, first in zip(self.numbers, self._first_numbers, strict=True):
            item.load_state_dict({key: stored.numbers.get(key, value) for key, value in first.items()})
        for name, item in self.per_rank.items():
            item.load_state_dict(stored.per_rank.get(name, {}))
        if stored.step == 0:
            for optimizer in self.tensors.values():
                if isinstance(optimizer, OptimizerState):
                    optimizer.clear()


class ModelState:
    """The saved weights of a model, with their current sharding.

    Args:
        only_trained: leave out the frozen weights, which a LoRA does not change.
    """

    def __init__(self, model: nn.Module, *, only_trained: bool = False) -> None:
        self.model = model
        self.only_trained = only_trained

    def state_dict(self) -> dict[str, torch.Tensor]:
        saved = saved_weights(self.model, only_trained=self.only_trained)
        return {name: tensor.detach() for name, tensor in saved.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=not self.only_trained))


class OptimizerState:
    """The state of an optimizer, keyed by the names of the model's parameters: `state.<parameter>.exp_avg`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizers = optimizer_parts(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The state, complete for a load to fill in. Saving changes nothing in the optimizer itself."""
        made = [(optimizer, make_optimizer_state(optimizer)) for optimizer in self.optimizers]
        state = dict(get_optimizer_state_dict(self.model, self.optimizers))
        for optimizer, parameters in made:
            for parameter in parameters:
                optimizer.state.pop(parameter, None)
        return state

    def make(self) -> None:
        """Give the optimizer all tensors that it will have, for a load."""
        for optimizer in self.optimizers:
            make_optimizer_state(optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.make()
        set_optimizer_state_dict(self.model, self.optimizers, state_dict)

    def clear(self) -> None:
        """Return to the state before the first step, which not every optimizer stores as zeros."""
        for optimizer in self.optimizers:
            optimizer.state.clear()


def make_optimizer_state(optimizer: Optimizer) -> list[nn.Parameter]:
    """Create the missing state tensors of an optimizer, so that a load can fill them in.

    A new optimizer has no state. Later, parameters without gradients still lack it (Qwen-Image has some).
    torch would create all of it with one step, using a zero gradient for every parameter at once. Doing this for one
    parameter after the other needs the memory of a single gradient. That step uses a learning rate of 0, and step
    counts are reset to 0. What else it leaves depends on the optimizer: SGD's momentum may hold weight decay.

    Returns:
        The parameters that had no state.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    without: list[nn.Parameter] = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not without:
        return []
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    gradients = [parameter.grad for parameter in parameters]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = None
    for parameter in without:
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
        if "step" in (made := optimizer.state.get(parameter, {})):
            made["step"] *= 0  # a tensor or a number
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)  # the learning rate, and counts that some optimizers keep here
    return without
