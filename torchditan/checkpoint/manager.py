# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoints in torch's distributed format: sharded writing, beside the training if asked, and loading on any mesh.

A checkpoint is `step-00000100/`: the tensors of model, EMA and optimizer, the run's `config.json`, `progress.json` with
the numbers that the rest of a run follows from (learning rate, data position and randomness are functions of them), and
`manifest.json` with the checksums of all of it.

Notable:
- it is written beside, as `step-00000100.partial`, read back and compared, and published by one rename;
- a damaged one is named, and the newest whole one is used; where none is whole, the run does not begin anew by itself;
- a disk that is full costs a checkpoint, never the run: every rank goes on, the last whole one stays;
- old ones are deleted by a thread of rank 0, so that no rank waits for slow storage;
- with `async` the training waits for a copy of the state only; a thread of each rank writes it, over a process group of
  its own. The copy's memory is kept and filled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from torchditan.checkpoint.files import (
    CheckpointReader,
    ChecksummingWriter,
    DamagedCheckpointError,
    discard,
    discard_unfinished,
    list_checkpoints,
    publish,
    read_back,
    remove,
    remove_discarded,
    step_of,
    verify,
    write_json,
    write_manifest,
)
from torchditan.checkpoint.loading import (
    CONFIG_FILE,
    PROGRESS_FILE,
    Progress,
    detached,
    latest_checkpoint,
    load_safely,
    read_progress,
)
from torchditan.checkpoint.staging import Stager
from torchditan.config.errors import ConfigError, option_error
from torchditan.config.loader import to_dict
from torchditan.config.options import Config
from torchditan.config.trajectory import differences, trajectory
from torchditan.models.saved_weights import saved_weights
from torchditan.optim.ema import EMA
from torchditan.optim.optimizers import optimizer_parts


def check_async_mode(config: Config, *, device: torch.device) -> None:
    """Refuse pinned memory where there is no GPU to copy from.

    Raises:
        ConfigError: checkpoint.async_mode asks for it.
    """
    if config.checkpoint.async_mode == "async_with_pinned_mem" and device.type != "cuda":
        right = "pinned memory is for copies from a GPU, and this machine has none; must be disabled or async"
        raise option_error("checkpoint.async_mode", config.checkpoint.async_mode, right)


class CheckpointManager:
    """Saves, prunes and loads the checkpoints of one run; every method is called by all ranks.

    Args:
        folder: that of the checkpoints, inside the run directory.
        config: the resolved settings; its `[checkpoint]` section says how to save.
        timeout_seconds: how long ranks wait for each other while they save or load.
        warn: prints a line; called on rank 0, perhaps by the thread that writes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: nn.Module,
        ema: EMA | None,
        optimizer: Optimizer,
        config: Config,
        timeout_seconds: int,
        warn: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2),
    ) -> None:
        self.folder = folder
        self.model = model
        self.ema = ema
        self.optimizers = optimizer_parts(optimizer)
        self.keep_latest_k = config.checkpoint.keep_latest_k
        self.only_trained = config.lora.rank > 0
        """The frozen weights under a LoRA are where they were published."""
        self.config = to_dict(config)
        self.trajectory = trajectory(config)
        self.warn = warn
        # A write goes on beside the training, whose collectives must not meet those of the write.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.stager: Stager | None = None
        if config.checkpoint.async_mode != "disabled":
            self.stager = Stager(pinned=config.checkpoint.async_mode == "async_with_pinned_mem")
        self.write_s: float | None = None
        """Seconds that the last finished write took; beside the training with `async`."""
        self.failure: str | None = None
        """Why the last write failed, None where it did not."""
        self._writing: threading.Thread | None = None
        self._cleaning: threading.Thread | None = None
        self._has_more_to_clean = False
        self._published_step = 0
        self._crash: BaseException | None = None

    def save(self, progress: Progress, *, loader_state: dict[str, Any] | None = None) -> None:
        """Write the checkpoint of this step, or begin to; once it is published, a thread deletes the oldest ones.

        A write that fails for want of space, or of a disk that works, is reported and leaves nothing behind.

        Args:
            progress: stored as JSON beside the tensors.
            loader_state: this rank's position in a source that can only be streamed, JSON-able.
        """
        self.wait()
        state, progress = self._state(), dataclasses.replace(progress)
        if self.stager is None:
            self._write(state, progress, loader_state)
            return
        staged = self.stager.stage(state)
        self._writing = threading.Thread(
            target=self._write_in_thread, args=(staged, progress, loader_state), name="checkpoint", daemon=True
        )
        self._writing.start()

    def wait(self) -> None:
        """Until the write that goes on beside the training is done."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        crash, self._crash = self._crash, None
        if crash is not None:
            raise crash

    def _write_in_thread(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:  # raised where the training waits for it
            self._crash = error

    def _write(self, state: dict[str, Any], progress: Progress, loader_state: dict[str, Any] | None) -> None:
        start = time.monotonic()
        target = self.folder / f"step-{progress.step:08d}"
        partial = target.with_suffix(".partial")
        self.failure = self._first_failure(lambda: _make_anew(partial) if dist.get_rank() == 0 else None)
        if self.failure is None:
            files: dict[str, list[Any]] = {}
            self.failure = self._first_failure(lambda: files.update(self._write_tensors(partial, state, loader_state)))
        if self.failure is None:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, files, group=self.group)
            checksums = {name: entry for of_rank in everyone for name, entry in of_rank.items()}
            self.failure = self._first_failure(lambda: self._publish(partial, target, progress, checksums))
        if dist.get_rank() == 0:
            if self.failure is None:
                self._published_step = progress.step
            else:
                with contextlib.suppress(OSError):  # it may not be there
                    discard(partial)
                last = latest_checkpoint(self.folder)
                kept = f"the last one is {last.name}" if last else "there is none yet"
                self.warn(f"warning: no checkpoint of step {progress.step}: {self.failure}; {kept}. The run goes on")
            self._start_cleaning()
        self.write_s = time.monotonic() - start

    def _write_tensors(
        self, partial: Path, state: dict[str, Any], loader_state: dict[str, Any] | None
    ) -> dict[str, list[Any]]:
        """Write this rank's files and read them back; their checksums."""
        # A staged state is on the host: with no copying ahead the thread that writes leaves the device alone.
        writer = ChecksummingWriter(partial, copy_ahead=10_000_000 if self.stager is None else 0)
        try:
            dcp.save(state, storage_writer=writer, process_group=self.group)
        except CheckpointException as error:
            raise writer.error or error from None
        if loader_state is not None:
            name = f"loader_rank{dist.get_rank()}.json"
            writer.checksums[name] = write_json(partial / name, loader_state)
        read_back(partial, writer.checksums)
        return writer.checksums

    def _publish(self, partial: Path, target: Path, progress: Progress, checksums: dict[str, list[Any]]) -> None:
        if dist.get_rank() == 0:
            publish_checkpoint(
                partial, target, checksums, progress=progress, config=self.config, trajectory=self.trajectory
            )

    def _first_failure(self, action: Callable[[], object]) -> str | None:
        """Do it on every rank; what the operating system refused to any of them, the same on all.

        Raises:
            RuntimeError: it failed in another way.
        """
        refused, other = None, None
        try:
            action()
        except OSError as error:
            refused = error.strerror or str(error)
        except CheckpointException as error:  # of this rank, or because another one was refused something
            other = str(error)
        refusal, failure = self._any_of(refused), self._any_of(other)
        if refusal is None and failure is not None:
            raise RuntimeError(f"the checkpoint cannot be written: {failure}")
        return refusal

    def load_latest(self) -> tuple[Progress, dict[str, Any] | None] | None:
        """Load the newest whole checkpoint, and say which newer ones are not; None where there is none at all.

        Raises:
            ConfigError: there are some, and none is whole.
        """
        self.wait()
        if dist.get_rank() == 0:
            discard_unfinished(self.folder)
            self._published_step = 0  # until a checkpoint is loaded and the next one written, none is pruned
            self._start_cleaning()
        names: list[Any] = [[path.name for path in list_checkpoints(self.folder)]]
        dist.broadcast_object_list(names, src=0, group=self.group)  # a shared folder may show ranks different lists
        found = [self.folder / name for name in reversed(names[0])]
        damages: list[str] = []
        for checkpoint in found:
            damage = self._damage_of(checkpoint) or self._load(checkpoint)
            if damage is None:
                for text in damages if dist.get_rank() == 0 else []:
                    self.warn(f"warning: {text}; continuing from {checkpoint.name}")
                loader = checkpoint / f"loader_rank{dist.get_rank()}.json"
                loader_state = json.loads(loader.read_text()) if loader.exists() else None
                return read_progress(checkpoint), loader_state
            damages.append(f"{checkpoint} is not used: {damage}")
        if damages:
            right = "to begin anew move them away, or name a new run with --metrics.experiment_name"
            raise ConfigError(f"no checkpoint is whole: {'; '.join(damages)}; {right}")
        return None

    def _damage_of(self, checkpoint: Path) -> str | None:
        """Why a checkpoint cannot continue this run; each rank reads a share of it, and all learn the answer."""
        damage = None
        try:
            manifest = verify(checkpoint, rank=dist.get_rank(), world_size=dist.get_world_size())
            read_progress(checkpoint)
            if differing := differences(manifest["trajectory"], self.trajectory):
                damage = f"it is of a run with other settings ({'; '.join(differing)})"
        except DamagedCheckpointError as error:
            damage = str(error)
        return self._any_of(damage)

    def _load(self, checkpoint: Path) -> str | None:
        """Load the tensors over those of the run; what went wrong, on any rank."""
        state, damage, stored = self._state(), None, {}
        reader = CheckpointReader(checkpoint)
        try:
            stored = reader.read_metadata().state_dict_metadata
        except DamagedCheckpointError as error:
            damage = str(error)
        if (damage := self._any_of(damage)) is not None:  # agreed before the collectives of a load
            return damage
        try:
            load_safely(_without_new_moments(state, stored), reader, process_group=self.group)
        except DamagedCheckpointError as error:
            damage = str(error)
        damage = self._any_of(damage)
        if damage is None:
            set_model_state_dict(self.model, state["model"], options=StateDictOptions(strict=not self.only_trained))
            set_optimizer_state_dict(self.model, self.optimizers, state["optimizer"])
        return damage

    def _any_of(self, text: str | None) -> str | None:
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text, group=self.group)
        return next((text for text in texts if text is not None), None)

    def _state(self) -> dict[str, Any]:
        for optimizer in self.optimizers:
            make_optimizer_state(optimizer)
        state: dict[str, Any] = {
            "model": detached(saved_weights(self.model, only_trained=self.only_trained)),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizers),
        }
        if self.ema is not None:
            state["ema"] = self.ema.state_dict()
        return state

    def close(self, *, patience_s: float | None = None) -> None:
        """Wait on rank 0 until old checkpoints are deleted. To be called where no other rank waits for this one.

        Args:
            patience_s: how long at most; what is left then, the next start deletes.
        """
        if self._cleaning is None:
            return
        self._cleaning.join(timeout=2.0 if patience_s is None else patience_s)
        if patience_s is None:
            if self._cleaning.is_alive():
                self.warn(f"deleting old checkpoints in {self.folder}")
            self._cleaning.join()
            self._clean_all()  # what came up as the thread ended

    def _start_cleaning(self) -> None:
        """Have a thread delete what is not needed any more; one that is busy looks again before it ends."""
        self._has_more_to_clean = True
        if self._cleaning is None or not self._cleaning.is_alive():
            self._cleaning = threading.Thread(target=self._clean_all, name="old checkpoints", daemon=True)
            self._cleaning.start()

    def _clean_all(self) -> None:
        while self._has_more_to_clean:
            self._has_more_to_clean = False
            self._clean(self._published_step)

    def _clean(self, step: int) -> None:
        """Prune the checkpoints before that of `step`, which is published, and delete what was discarded."""
        with contextlib.suppress(OSError):  # of storage that fails; the next start deletes the rest
            # Newer ones are damaged, or this run would stand there: they do not count.
            reached = [path for path in list_checkpoints(self.folder) if step_of(path) <= step]
            for old in reached[: -self.keep_latest_k] if self.keep_latest_k else []:
                with contextlib.suppress(OSError):  # a reader may have it open on NFS
                    remove(old)
            remove_discarded(self.folder)


def publish_checkpoint(
    partial: Path,
    target: Path,
    checksums: dict[str, list[Any]],
    *,
    progress: Progress,
    config: dict[str, Any],
    trajectory: dict[str, Any],
) -> None:
    """Put what makes it a checkpoint to the files that are there, whose checksums are given, and give it its name."""
    own = {CONFIG_FILE: write_json(partial / CONFIG_FILE, config)}
    own[PROGRESS_FILE] = write_json(partial / PROGRESS_FILE, dataclasses.asdict(progress))
    write_manifest(partial, step=progress.step, trajectory=trajectory, checksums={**checksums, **own})
    publish(partial, target)


def make_optimizer_state(optimizer: Optimizer) -> None:
    """Give an optimizer the tensors that a load fills in, for each parameter that has none.

    A new optimizer has none at all; later, those parameters lack them that no gradient reached (Qwen-Image has some).
    torch would make them by one step with a gradient of zeros for every parameter at once. One after the other needs
    the memory of a single gradient. The learning rate of that step is 0, and where the optimizer counts steps the
    count goes back to 0: what is saved here is a state before any.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    without = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not without:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
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
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _without_new_moments(state: dict[str, Any], stored: Iterable[str]) -> dict[str, Any]:
    """The state without the moments of parameters for which a checkpoint has none: no gradient had reached them."""
    prefix = "optimizer.state."
    have = {key.removeprefix(prefix).rpartition(".")[0] for key in stored if key.startswith(prefix)}
    if not have:
        return state  # there must be some
    moments = {name: value for name, value in state["optimizer"]["state"].items() if name in have}
    return {**state, "optimizer": {**state["optimizer"], "state": moments}}


def _make_anew(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
