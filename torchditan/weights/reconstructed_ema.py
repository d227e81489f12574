# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Averages of any width, computed after training from stored snapshots (Karras et al. 2024, arXiv 2312.02696, app. C).

A snapshot contains averages of the weights over the steps so far, each with a power function as its profile. The
profile of another width is approximated by a linear combination of these profiles, with the least squared error over
the time of training. The same combination of the stored averages approximates the average of that width.

Two details differ from the paper. The coefficients must sum to 1, so that weights that stand still are reproduced
exactly. Averages whose coefficients sum to less than 1e-7 are not read.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchditan.checkpoint.files import CheckpointReader, DamagedCheckpointError, list_checkpoints, step_of, verify
from torchditan.checkpoint.loading import read_progress
from torchditan.checkpoint.post_hoc_ema import AVERAGES, snapshot_folder
from torchditan.config.errors import ConfigError, option_error
from torchditan.config.loader import from_dict, to_dict
from torchditan.config.options import Config
from torchditan.models.saved_weights import keys_under
from torchditan.optim.power_ema import gamma_of_width
from torchditan.run.reading import read_config
from torchditan.run.training_progress import Progress
from torchditan.weights.exported import StoredWeights, names_in, read_tensor
from torchditan.weights.importing import create_run, refuse_existing
from torchditan.weights.safetensors_files import TensorToWrite, open_file, write_weights

_NOT_READ = 1e-7
"""Sum of the absolute coefficients of the averages that are not read, about the resolution of float32."""
LARGE_ERROR = 0.03
"""Error of the profile above which the weights may differ by more than 1e-3 (docs/optimizer_and_ema.md)."""


@dataclass(frozen=True)
class Combination:
    """A linear combination of stored averages."""

    coefficients: Tensor
    """(N,) float64, one for each stored average."""
    error: float
    """Root of the squared difference from the wanted profile over time, relative to that profile."""


@dataclass(frozen=True)
class Reconstruction:
    """What `reconstruct` wrote."""

    step: int
    num_read: int
    num_stored: int
    """Averages up to this step, of all widths."""
    error: float
    """As in `Combination`."""


def combine(steps: Sequence[int], widths: Sequence[float], *, step: int, width: float) -> Combination:
    """Coefficients of stored averages that give the average of another width: min |p - sum_i x_i p_i|^2, sum_i x_i = 1.

    Args:
        steps, widths: of each stored average; the pairs are distinct.
        step, width: of the wanted average; the step is not before those of the stored ones.
    """
    times = torch.tensor(steps, dtype=torch.float64) / step
    gammas = torch.tensor([gamma_of_width(value) for value in widths], dtype=torch.float64)
    time, gamma = torch.ones_like(times[:1]), torch.full_like(times[:1], gamma_of_width(width))
    products = _inner_products(times[:, None], gammas[:, None], times, gammas)  # (N, N)
    wanted = _inner_products(times, gammas, time, gamma)  # (N,)
    # With the Lagrange multiplier of the constraint: [[A, 1], [1, 0]] [x, m] = [b, 1].
    system = torch.ones(len(times) + 1, len(times) + 1, dtype=torch.float64)
    system[:-1, :-1], system[-1, -1] = products, 0
    coefficients = torch.linalg.solve(system, torch.cat([wanted, time]))[:-1]
    size = _inner_products(time, gamma, time, gamma)
    squared = coefficients @ products @ coefficients - 2 * coefficients @ wanted + size
    return Combination(coefficients, (squared.clamp(min=0) / size).sqrt().item())


def _inner_products(time: Tensor, gamma: Tensor, other_time: Tensor, other_gamma: Tensor) -> Tensor:
    """Integral over s of p(s) q(s), where p(s) = (gamma + 1) s^gamma / time^(gamma + 1) up to `time`, and 0 after it.

    Computed by logarithms: the powers of an early time would underflow.
    """
    power = gamma + other_gamma + 1
    logarithm = power * torch.minimum(time, other_time).log()
    logarithm = logarithm - (gamma + 1) * time.log() - (other_gamma + 1) * other_time.log()
    return (gamma + 1) * (other_gamma + 1) / power * logarithm.exp()


def reconstruct(
    run: Path, out: Path, *, width: float, step: int | None = None, overwrite: bool = False
) -> Reconstruction:
    """Compute an average after training, and create a run directory with it that can be sampled and evaluated.

    Reads one tensor at a time. Until the directory is complete, the average is on the disk twice.

    Args:
        run: a run with `ema.post_hoc_widths`.
        out: directory to create.
        width: of the average, relative to the steps that it covers (sigma_rel of the paper).
        step: of a snapshot, the last one in the average; None takes the newest complete one.
        overwrite: replace `out` if it was imported or reconstructed.

    Raises:
        ConfigError: the run has no such snapshots, they are damaged, or `out` exists or cannot be written.
    """
    content = read_config(run)
    config = from_dict(content["config"]).replace({"ema.enable": True})
    snapshots = _find_snapshots(run, content, config, step)
    refuse_existing(out, overwrite=overwrite)
    widths = config.ema.post_hoc_widths
    newest, terms, combination = _combine_complete(snapshots, widths, width=width, step=step)
    try:
        shapes, read, progress = _open(newest, terms)
    except DamagedCheckpointError as error:
        raise ConfigError(f"{newest} cannot be read: {error}") from None
    origin = {"run": str(run), "run_id": content.get("run_id")}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".partial", dir=out.parent) as folder:
            path = Path(folder) / f"average of width {width:g} of {run.resolve().name}"
            tensors = [TensorToWrite(name, shape, torch.float32, partial(read, name)) for name, shape in shapes.items()]
            write_weights(path, tensors, {})
            commit = content.get("git_commit")
            names = names_in(content.get("class_names"))
            stored = StoredWeights(
                path, shapes, to_dict(config), progress.step, progress.images_seen, "ema", commit, width, names
            )
            with open_file(path) as file:
                averages = {name: file.get_tensor(name) for name in shapes}  # memory-mapped until written
                create_run(out, stored, config, averages, origin=origin)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    except DamagedCheckpointError as error:
        raise ConfigError(f"a snapshot of {run} cannot be read: {error}") from None
    return Reconstruction(progress.step, len(terms), len(combination.coefficients), combination.error)


@dataclass(frozen=True)
class _Term:
    """A stored average and its coefficient."""

    snapshot: Path
    position: int
    """Of its width in `ema.post_hoc_widths`."""
    coefficient: float


def _find_snapshots(run: Path, content: dict[str, Any], config: Config, step: int | None) -> list[Path]:
    """The snapshots up to `step`, oldest first."""
    if "imported" in content:
        raise option_error("RUN", str(run), "was computed or imported; must be a run of train.py with snapshots")
    if not config.ema.post_hoc_widths:
        right = "stored no averages; train with --ema.post_hoc_widths 0.05,0.1"
        raise option_error("RUN", str(run), right)
    folder = snapshot_folder(run, config)
    found = {step_of(path): path for path in list_checkpoints(folder)}
    if not found:
        raise option_error("RUN", str(run), f"has no snapshot of its averages in {folder}")
    if step is not None and step not in found:
        raise option_error("--step", step, f"no snapshot of this step in {folder}; there are {sorted(found)}")
    return [path for number, path in found.items() if step is None or number <= step]


def _combine_complete(
    snapshots: list[Path], widths: Sequence[float], *, width: float, step: int | None
) -> tuple[Path, list[_Term], Combination]:
    """The newest snapshot, the terms to read, and their combination. Damaged snapshots are left out.

    Raises:
        ConfigError: no snapshot is complete, or that of `step` is damaged.
    """
    complete: set[Path] = set()
    while snapshots:
        stored = [(snapshot, position) for snapshot in snapshots for position in range(len(widths))]
        combination = combine(
            [step_of(snapshot) for snapshot, _ in stored],
            [widths[position] for _, position in stored],
            step=step_of(snapshots[-1]),
            width=width,
        )
        is_read = _large(combination.coefficients)
        terms = [
            _Term(*average, coefficient)
            for average, coefficient, wanted in zip(stored, combination.coefficients.tolist(), is_read, strict=True)
            if wanted
        ]
        used = {snapshots[-1], *(term.snapshot for term in terms)}
        damages = {path: damage for path in sorted(used - complete) if (damage := _damage_of(path)) is not None}
        if not damages:
            return snapshots[-1], terms, combination
        for path, damage in damages.items():
            if step == step_of(path):
                raise option_error("--step", step, f"{path} is damaged: {damage}")
        for path, damage in damages.items():
            print(f"warning: {path} is not used: {damage}", file=sys.stderr)
        complete |= used - damages.keys()
        snapshots = [path for path in snapshots if path not in damages]
    raise ConfigError("no snapshot of the averages is complete")


def _large(coefficients: Tensor) -> list[bool]:
    """Which coefficients are read: all but the smallest ones, whose sum is below `_NOT_READ`."""
    sizes, order = coefficients.abs().sort()
    is_read = torch.ones_like(order, dtype=torch.bool)
    is_read[order[sizes.cumsum(0) < _NOT_READ]] = False
    return is_read.tolist()


def _damage_of(snapshot: Path) -> str | None:
    try:
        verify(snapshot)
    except DamagedCheckpointError as error:
        return str(error)
    return None


def _open(newest: Path, terms: Sequence[_Term]) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor], Progress]:
    """Shapes of the weights by name, a function that computes one of them, and how far the run was."""
    readers = {path: CheckpointReader(path) for path in {newest, *(term.snapshot for term in terms)}}
    entries = {
        key: tuple(entry.size)
        for key, entry in readers[newest].read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    parameters = {name: entries[key] for name, key in keys_under(f"{AVERAGES}.0.", entries).items()}
    buffers = {key.removeprefix("model."): shape for key, shape in entries.items() if key.startswith("model.")}

    def read(name: str) -> Tensor:
        if name in buffers:
            return read_tensor(readers[newest], f"model.{name}")
        total = torch.zeros(parameters[name], dtype=torch.float64)
        for term in terms:
            tensor = read_tensor(readers[term.snapshot], f"{AVERAGES}.{term.position}.{name}")
            total.add_(tensor.double(), alpha=term.coefficient)
        return total.float()

    return {**buffers, **parameters}, read, read_progress(newest)
