# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoints in torch's distributed format: sharded, optionally asynchronous writing, and loading on any mesh.

A checkpoint is a folder `step-00000100/`. It contains the tensors of model, EMA and optimizer, the run's `config.json`,
`progress.json`, and `manifest.json` with the sizes of all files. `progress.json` stores the numbers that determine
the rest of a run: learning rate, data position and randomness are functions of them.

Notable:
- a checkpoint is written to `step-00000100.partial`, and published by one rename. Sizes are checked when it is loaded;
- a damaged checkpoint is reported, and the newest complete one is used. If every checkpoint is damaged, the run refuses
  to start;
- a full disk costs a checkpoint, never the run: every rank continues, and the last complete checkpoint stays. At the
  last step, the weights alone are written instead;
- a thread of rank 0 deletes old checkpoints, so that no rank waits for slow storage;
- in mode `async`, training waits only while the state is copied. A thread of each rank writes the copy and uses a
  separate process group. The memory of the copy is reused.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import cuda
from torch.distributed.checkpoint.api import CheckpointException

from torchditan.checkpoint.files import (
    CONFIG_FILE,
    PROGRESS_FILE,
    discard,
    discard_unfinished,
    final_weights,
    latest_checkpoint,
    list_checkpoints,
    publish,
    remove_discarded,
    save_tensors,
    step_of,
    write_json,
    write_manifest,
)
from torchditan.checkpoint.loading import CheckpointReader, DamagedCheckpointError, load_safely, read_numbers
from torchditan.checkpoint.run_state import ModelState, RunState, Snapshot
from torchditan.checkpoint.weights import Kind, export_model, open_weights_file
from torchditan.config.loader import to_dict
from torchditan.config.options import Config
from torchditan.config.trajectory import differences
from torchditan.errors import ConfigError

if TYPE_CHECKING:
    from torchditan.checkpoint.staging import Stager


class CheckpointManager:
    """Saves, prunes and loads the checkpoints of one run. All ranks call every method.

    Args:
        folder: checkpoint folder inside the run directory.
        state: everything that a checkpoint contains.
        config: the resolved settings; the `[checkpoint]` section controls saving.
        timeout_seconds: how long ranks wait for each other while they save or load.
        trajectory: `Job.trajectory`, the settings that determine the weights.
        warn: prints a line. Called on rank 0, possibly by the writing thread.
    """

    def __init__(
        self,
        folder: Path,
        state: RunState,
        *,
        config: Config,
        trajectory: dict[str, Any],
        timeout_seconds: int,
        warn: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2),
    ) -> None:
        self.folder = folder
        self.state = state
        self.keep_latest_k = config.checkpoint.keep_latest_k
        self.has_checkpoints = config.checkpoint.enable_checkpoint
        """Whether the run writes checkpoints, or only its final weights. True after it continued from a checkpoint."""
        self.config = to_dict(config)
        self.trajectory = trajectory
        self.num_steps = config.training.steps
        self.warn = warn
        # Asynchronous writes run during training, so their collectives need a separate process group.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        # One process exchanges no plans. They are large, so gloo's threads would copy them with OpenMP workers of their
        # own. GNU OpenMP then counts more threads than cores, lets its workers sleep, and every later step is slower.
        self.no_dist = dist.get_world_size() == 1
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # what `no_dist` says
        self.stager: Stager | None = None
        if config.checkpoint.async_mode != "disabled":
            from torchditan.checkpoint.staging import Stager

            self.stager = Stager(pinned=config.checkpoint.async_mode == "async_with_pinned_mem" and cuda.is_available())
        self.write_s: float | None = None
        """Seconds that the last finished write took; with `async` it ran during training."""
        self.failure: str | None = None
        """Why the last write failed; None if it succeeded."""
        self._writing: threading.Thread | None = None
        self._cleaning: threading.Thread | None = None
        self._published_step = 0
        self._crash: BaseException | None = None

    def save(self) -> None:
        """Write the checkpoint of this step, or start writing it. After publishing, a thread deletes the oldest ones.

        If the disk is full or fails, the write is reported and leaves no files. At the last step, the weights alone are
        written instead.
        """
        self.wait()
        snapshot = self.state.snapshot()
        if self.stager is None:
            self._write(snapshot)
        else:
            tensors, per_rank = self.stager.stage(snapshot.tensors), copy.deepcopy(snapshot.per_rank)
            staged = snapshot._replace(tensors=tensors, per_rank=per_rank)
            self._writing = threading.Thread(
                target=self._write_in_thread, args=(staged,), name="checkpoint", daemon=True
            )
            self._writing.start()
        if snapshot.step == self.num_steps:
            self.wait()
            if (refusal := self.failure) is not None:
                self.save_weights()
                if self.failure is None and dist.get_rank() == 0:
                    alone = "no run continues from it, but --checkpoint.initial_load_path starts one"
                    self.warn(f"warning: {refusal}; step {snapshot.step} is saved without the optimizer: {alone}")

    def save_weights(self) -> None:
        """Write only the weights of this step, averaged if the run has an average, to one file."""
        progress, model, average = self.state.progress, self.state.tensors["model"], self.state.tensors.get("ema")
        path = self._final_weights_path(progress.step)
        kind: Kind = "raw" if average is None else "ema"
        weights = {**model.state_dict(), **({} if average is None else average.state_dict())}
        self.failure = self._first_failure(
            lambda: export_model(path, weights, config=self.config, progress=progress, kind=kind)
        )

    def _final_weights_path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def load_final_weights(self) -> bool:
        """Load the weights that a finished run kept instead of checkpoints. Returns whether there are any."""
        found = [final_weights(self.folder)]
        dist.broadcast_object_list(found, src=0, group=self.group)
        if found[0] is None:
            return False
        model, progress = cast(ModelState, self.state.tensors["model"]), self.state.progress
        weights = open_weights_file(found[0])
        weights.check(model.model, only_trained=model.only_trained)
        weights.fill(model.model, only_trained=model.only_trained)
        progress.step, progress.images_seen = step_of(found[0]), weights.images_seen or 0
        return True

    def wait(self) -> None:
        """Wait until an asynchronous write has finished."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        crash, self._crash = self._crash, None
        if crash is not None:
            raise crash

    def _write_in_thread(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except BaseException as error:  # raised again in `wait`
            self._crash = error

    def _write(self, snapshot: Snapshot) -> None:
        start = time.monotonic()
        target = self.folder / f"step-{snapshot.step:08d}"
        partial = target.with_suffix(".partial")
        self.failure = self._first_failure(lambda: self._write_files(partial, snapshot))
        if self.failure is None:
            self.failure = self._first_failure(lambda: self._publish(partial, target, snapshot))
        if dist.get_rank() == 0:
            if self.failure is not None:
                with contextlib.suppress(OSError):  # it may not exist
                    discard(partial)
                if snapshot.step < self.num_steps:
                    last = latest_checkpoint(self.folder)
                    kept = f"the last one is {last.name}" if last else "no checkpoint exists yet"
                    missing = f"no checkpoint of step {snapshot.step}: {self.failure}"
                    self.warn(f"warning: {missing}; {kept}. The run continues")
            else:
                self._published_step = snapshot.step
                self._final_weights_path(snapshot.step).unlink(missing_ok=True)  # of an earlier attempt on a full disk
            self._start_cleaning()
            if self.failure is not None and snapshot.step == self.num_steps:  # the next attempt needs the space
                self.close()
        self.write_s = time.monotonic() - start

    def _write_files(self, partial: Path, snapshot: Snapshot) -> None:
        """Write this rank's files."""
        save_tensors(snapshot.tensors, partial, process_group=self.group, no_dist=self.no_dist)
        for name, state in snapshot.per_rank.items():
            if state:
                write_json(_file_of_rank(partial, name), state)

    def _publish(self, partial: Path, target: Path, snapshot: Snapshot) -> None:
        """Rank 0 adds the files that all ranks share, and gives the folder its name."""
        if dist.get_rank() == 0:
            write_json(partial / CONFIG_FILE, self.config)
            write_json(partial / PROGRESS_FILE, snapshot.numbers)
            write_manifest(partial, step=snapshot.step, trajectory=self.trajectory)
            publish(partial, target)

    def _first_failure(self, action: Callable[[], object]) -> str | None:
        """Run `action` on every rank. Returns the first operating system error of any rank, the same on all ranks.

        Raises:
            RuntimeError: it failed for another reason.
        """
        refused, other = None, None
        try:
            action()
        except OSError as error:
            refused = error.strerror or str(error)
        except CheckpointException as error:  # of this rank, or because another rank failed
            other = str(error)
        refusal, failure = self._any_of(refused), self._any_of(other)
        if refusal is None and failure is not None:
            raise RuntimeError(f"the checkpoint cannot be written: {failure}")
        return refusal

    def load_latest(self) -> bool:
        """Load the newest complete checkpoint into the run's state, and report newer ones that are damaged.

        Returns:
            Whether a checkpoint was loaded.

        Raises:
            ConfigError: there are checkpoints, but none can be used.
        """
        self.wait()
        if dist.get_rank() == 0:
            discard_unfinished(self.folder)
            self._published_step = 0  # no pruning until a checkpoint is loaded and the next one written
            self._start_cleaning()
        names: list[Any] = [[path.name for path in list_checkpoints(self.folder)]]
        dist.broadcast_object_list(names, src=0, group=self.group)  # a shared folder may show ranks different lists
        found = [self.folder / name for name in reversed(names[0])]
        damages: list[str] = []
        for checkpoint in found:
            damage = self._load(checkpoint)
            if damage is None:
                for text in damages if dist.get_rank() == 0 else []:
                    self.warn(f"warning: {text}; continuing from {checkpoint.name}")
                self.has_checkpoints = True
                return True
            damages.append(f"{checkpoint} is not used: {damage}")
        if damages:
            right = "to start over, move them away, or name a new run with --metrics.experiment_name"
            raise ConfigError(f"no checkpoint can be used: {'; '.join(damages)}; {right}")
        return False

    def _load(self, checkpoint: Path) -> str | None:
        """Load the state of the run, or return why any rank cannot, the same on all ranks."""
        reader = CheckpointReader(checkpoint)
        # Ranks must agree before the collectives of a load.
        if (refusal := self._any_of(self._refusal_of(reader))) is not None:
            return refusal
        tensors, damage = self.state.states_to_fill(), None
        try:
            load_safely(tensors, reader, process_group=self.group, no_dist=self.no_dist)
        except DamagedCheckpointError as error:
            damage = str(error)
        damage = self._any_of(damage)
        if damage is None:
            files = {name: _file_of_rank(checkpoint, name) for name in self.state.per_rank}
            per_rank = {name: json.loads(file.read_bytes()) for name, file in files.items() if file.exists()}
            self.state.load(Snapshot(tensors, read_numbers(checkpoint), per_rank))
        return damage

    def _refusal_of(self, reader: CheckpointReader) -> str | None:
        """Why this rank cannot use a checkpoint."""
        try:
            reader.read_metadata()
            read_numbers(reader.folder)
        except DamagedCheckpointError as error:
            return str(error)
        differing = differences(reader.manifest["trajectory"], self.trajectory)
        return f"it belongs to a run with other settings ({'; '.join(differing)})" if differing else None

    def _any_of(self, text: str | None) -> str | None:
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text, group=self.group)
        return next((text for text in texts if text is not None), None)

    def close(self, *, patience_s: float | None = None) -> None:
        """Wait on rank 0 until old checkpoints are deleted. Call it only if no other rank waits for rank 0.

        Args:
            patience_s: maximum seconds to wait; the next start deletes the rest.
        """
        if self._cleaning is None:
            return
        self._cleaning.join(timeout=2.0 if patience_s is None else patience_s)
        if patience_s is None:
            if self._cleaning.is_alive():
                self.warn(f"deleting old checkpoints in {self.folder}")
            self._cleaning.join()

    def _start_cleaning(self) -> None:
        """Start a thread that deletes obsolete checkpoints, after the thread before it."""
        job = (self._published_step, self._cleaning)
        self._cleaning = threading.Thread(target=self._clean, args=job, name="old checkpoints", daemon=True)
        self._cleaning.start()

    def _clean(self, step: int, before: threading.Thread | None) -> None:
        """Delete discarded folders, and prune the checkpoints before the published one of `step`."""
        if before is not None:
            before.join()
        with contextlib.suppress(OSError):  # failing storage; the next start deletes the rest
            # Newer checkpoints do not count: they are damaged, or the run would have loaded them.
            reached = [path for path in list_checkpoints(self.folder) if step_of(path) <= step]
            for old in reached[: -self.keep_latest_k] if self.keep_latest_k else []:
                discard(old)
            remove_discarded(self.folder)


def _file_of_rank(folder: Path, name: str) -> Path:
    return folder / f"{name}_rank{dist.get_rank()}.json"
