# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`open_weights`: weights at any address. `load`, `generate`, `evaluate`, `export`, `share`, `import` and
`checkpoint.initial_load_path` call it.

Notable:
- an address is a run directory, a checkpoint in one or alone, a .safetensors file, a shared folder, `hub:owner/name`,
  the name of a shipped model, or the folder of a LoRA. formats/ reads files of other projects;
- opening reads the description only. `Weights.tensor` reads one tensor, so no more than one is in memory;
- opening writes nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchditan.checkpoint.files import CheckpointReader, DamagedCheckpointError, list_checkpoints
from torchditan.checkpoint.loading import cannot_be_read, find_checkpoint, load_safely, read_progress
from torchditan.config.errors import ConfigError, option_error
from torchditan.config.loader import from_dict, override
from torchditan.config.options import Config
from torchditan.config.trajectory import differences
from torchditan.evaluation.card import OF_NO_RUN
from torchditan.models.initialization import fill
from torchditan.models.saved_weights import checkpoint_keys, required_names, saved_weights
from torchditan.registry import FORMATS
from torchditan.run.atomic_files import sha256_of
from torchditan.run.reading import read_config
from torchditan.weights.safetensors_files import is_of_diffusers, is_pickle, open_file
from torchditan.weights.shared import check_address, find_shared, is_shared

Kind = Literal["ema", "raw"]

FORMAT = "torchditan"
VERSION = "1"
"""Version of the metadata of a file; raised when an older reader would misunderstand it."""
HOW_TO_IMPORT = (
    "import weights of another project first: torchditan import WEIGHTS RUN --format "
    f"{'|'.join(FORMATS)}, then start from RUN"
)
_READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
_NUM_SHOWN = 3


@dataclass(frozen=True)
class Weights:
    """Weights that were opened: their description, and a function that reads one of them."""

    path: Path
    """The file, or the folder of the checkpoint."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes by the model's parameter names."""
    tensor: Callable[[str], Tensor]
    """Reads a whole tensor by its name, on the CPU.

    Raises:
        ConfigError: it is damaged.
    """
    config: dict[str, dict[str, Any]] | None = None
    """The resolved configuration. This and all fields below are None for files of other projects."""
    step: int | None = None
    images_seen: int | None = None
    kind: Kind | None = None
    git_commit: str | None = None
    class_names: list[str] = field(default_factory=list)
    """By label; empty if they are not known."""
    run: Path | None = None
    """The run directory that contains them."""
    content: dict[str, Any] = field(default_factory=dict)
    """config.json of `run`, or of a folder of diffusers."""
    name: str = ""
    """Of the file, the folder, the repository or the shipped model."""
    digest: str | None = None
    """SHA-256 of the file, if it was checked."""
    notes: tuple[str, ...] = ()
    """What an import from another project converted, one phrase each."""

    @classmethod
    def of(cls, path: Path, tensors: Mapping[str, Tensor], **fields: Any) -> Weights:
        """Tensors in memory, or memory-mapped."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(path, shapes, tensors.__getitem__, **fields)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {name: self.tensor(name) for name in self.shapes}

    def with_tensors(self, tensors: Mapping[str, Tensor], **changed: Any) -> Weights:
        """With these tensors, and other fields, in place of its own."""
        of = Weights.of(self.path, tensors)
        return replace(self, shapes=of.shapes, tensor=of.tensor, **changed)

    @property
    def num_values(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @cached_property
    def run_id(self) -> str | None:
        """Identifies the run, also after its folder moved; for other weights `sha256-` and the start of their hash."""
        if self.run is not None:
            return self.content.get("run_id")
        digest = self.digest
        if digest is None and self.path.is_file():
            digest = sha256_of(self.path)
        if digest is None:
            files = sorted(path for path in self.path.iterdir() if path.is_file())
            digest = sha256(" ".join(map(sha256_of, files)).encode()).hexdigest()
        return OF_NO_RUN + digest[:8]

    def checked_config(self) -> Config:
        """The configuration. One that is not of a run may be untrusted, and passes the checks of a user's.

        Raises:
            ConfigError: there is none, it is not valid here, or is incomplete.
        """
        if self.config is None:
            raise ConfigError(
                f"{self.path} has weights without a configuration; must be a file that torchditan export wrote. "
                f"For those of another project, add --format {', '.join(FORMATS)} (docs/checkpoints.md). A new run can "
                "start from other weights with checkpoint.initial_load_path"
            )
        if self.run is not None:
            return from_dict(self.config)
        try:
            config = override(from_dict(self.config), [], sections=())
        except ConfigError as error:
            raise ConfigError(f"{self.path} has a configuration that is not valid here: {error}") from None
        sizes = (config.dataset.image_size, config.model.sample_size)
        if None in (*sizes, config.dataset.num_classes, config.model.input_channels):
            raise ConfigError(f"{self.path} has a configuration that does not set image size, classes or channels")
        return config

    def check(
        self,
        model: nn.Module,
        *,
        only_trained: bool = False,
        are_initial: bool = False,
        differing_options: Iterable[str] = (),
    ) -> None:
        """Refuse a model, possibly on the meta device, whose names or shapes differ from those of the weights.

        Args:
            only_trained: the weights are only those of a LoRA.
            are_initial: a new run starts from them, so that new embedders may be missing.
            differing_options: for the message.

        Raises:
            ConfigError: they differ. Only buffers may be missing.
        """
        required = required_names(model, only_trained=only_trained, are_initial=are_initial)
        expected = {
            name: tuple(tensor.shape)
            for name, tensor in saved_weights(model).items()
            if name in required or name in self.shapes
        }
        there: dict[str, Any] = {name: str(shape) for name, shape in self.shapes.items()}
        phrases = differences(there, {name: str(shape) for name, shape in expected.items()})
        if phrases:
            more = [f"{len(phrases) - _NUM_SHOWN} more"] if len(phrases) > _NUM_SHOWN else []
            raise ConfigError(
                f"{self.path} holds another model: {'; '.join([*differing_options, *phrases[:_NUM_SHOWN], *more])}. "
                "Use its options, or weights of this model"
            )

    def fill(self, model: nn.Module, *, only_trained: bool = False) -> None:
        """Load the weights into a model of any sharding that `check` accepts, in place.

        Raises:
            ConfigError: a tensor is damaged.
        """
        for name, tensor in saved_weights(model, only_trained=only_trained).items():
            if name in self.shapes:
                fill(tensor, self.tensor(name))

    def of_its_run(self) -> Weights:
        """These weights with what the run says whose checkpoint folder they are in, if there is one."""
        for run in self.path.absolute().parents:
            if (run / "config.json").is_file():
                with suppress(ConfigError):
                    content = read_config(run)
                    folder = run / from_dict(content["config"]).checkpoint.folder
                    if folder.resolve() == self.path.resolve().parent:
                        return self.of_run(run, content)
        return self

    def of_run(self, run: Path, content: dict[str, Any]) -> Weights:
        """Its configuration is newer than that of the weights: some options may change on resume."""
        return replace(
            self,
            config=content["config"],
            git_commit=content.get("git_commit"),
            class_names=_names_in(content.get("class_names")),
            run=run,
            content=content,
            name=run.name,
        )


def open_weights(place: str | os.PathLike[str], *, step: int | None = None, kind: Kind | None = None) -> Weights:
    """Open weights at any address, see the top of this file.

    Args:
        place: the address. A path that exists wins over the name of a shipped model.
        step: of a run's checkpoint; None takes the newest complete one.
        kind: averaged or raw; None takes the averaged ones if there are any.

    Raises:
        ConfigError: nothing is there, it is damaged, or it has no such step or kind.
    """
    path = Path(place).expanduser()
    check_address(path)
    if kind not in (None, "ema", "raw"):
        raise option_error("--weights", kind, "must be ema or raw")
    if is_shared(path):
        shared = find_shared(path)
        weights = replace(open_weights_file(shared.weights), name=shared.name, digest=shared.digest)
    elif path.is_file():
        weights = open_weights_file(path)
    elif is_of_diffusers(path):
        right = "give it as --model.path, with its --model.name; import a DiT with torchditan import"
        raise ConfigError(f"{path} is a folder that diffusers saved; {right} {path} RUN --format diffusers")
    elif path.resolve() in list_checkpoints(path.resolve().parent):
        weights = _open_checkpoint(path, kind=kind)
    elif not (path / "config.json").exists() and len(files := list(path.glob("*.safetensors"))) == 1:
        weights = open_weights_file(files[0])  # the folder of a LoRA, as diffusers and peft save it
    else:
        weights = _open_run(path, step=step, kind=kind)
    if weights.step is not None and step not in (None, weights.step):
        raise option_error("--step", step, f"{place} has step {weights.step}; leave it out")
    if weights.kind is not None and kind not in (None, weights.kind):
        raise option_error("--weights", kind, f"{place} has only the other weights; must be {weights.kind}")
    return weights


def open_model(place: str | os.PathLike[str], *, step: int | None = None, kind: Kind | None = None) -> Weights:
    """`open_weights` for those of a whole model with its configuration, which can be written elsewhere.

    Raises:
        ConfigError: they are those of a LoRA, or have no configuration; or as `open_weights`.
    """
    weights = open_weights(place, step=step, kind=kind)
    if weights.checked_config().lora.rank:
        right = "trained a LoRA; export it with torchditan export_lora RUN OUT.safetensors"
        raise option_error("RUN", str(place), right)
    return weights


def open_weights_file(path: Path) -> Weights:
    """Open a .safetensors file.

    Raises:
        ConfigError: it is another file, is damaged, or its metadata are of another version.
    """
    if is_pickle(path):
        raise ConfigError(f"{path} is a PyTorch file, whose pickle may execute code; {HOW_TO_IMPORT}")
    with open_file(path) as file:
        metadata, slices = file.metadata() or {}, {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        others = [(name, part.get_dtype()) for name, part in slices.items() if part.get_dtype() not in _READABLE_DTYPES]
    if others:
        raise ConfigError(f"{path} has {others[0][0]} as {others[0][1]}; weights must be floating-point numbers")
    weights = Weights(path, shapes, partial(_read_from_file, path), name=path.stem)
    if metadata.get("format") != FORMAT:
        return weights
    if metadata.get("version") != VERSION:
        right = f"has version {metadata.get('version')}, possibly of a newer TorchDiTan; this one reads version"
        raise ConfigError(f"{path} {right} {VERSION}")
    try:
        described = {name: json.loads(metadata.get(name, "null")) for name in ("config", "class_names")}
        counts = {name: int(metadata[name]) for name in ("step", "images_seen")}
        kind = metadata["weights"]
    except (KeyError, ValueError, RecursionError):
        kind = None
    if kind not in ("ema", "raw") or not _is_config(described["config"]):
        raise ConfigError(f"{path} has invalid metadata; export it again")
    return replace(
        weights,
        **counts,
        config=described["config"],
        kind=cast(Kind, kind),
        git_commit=metadata.get("git_commit"),
        class_names=_names_in(described["class_names"]),
    )


def _read_from_file(path: Path, name: str) -> Tensor:
    # Reopened for each tensor: pages of a memory map that were read count as memory of the process.
    with open_file(path) as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _open_run(run: Path, *, step: int | None, kind: Kind | None) -> Weights:
    """A checkpoint of a run, or the file of its final weights if it saved no checkpoints."""
    content = read_config(run)
    found = find_checkpoint(run / from_dict(content["config"]).checkpoint.folder, step)
    weights = _open_checkpoint(found, kind=kind) if found.is_dir() else open_weights_file(found)
    return weights.of_run(run, content)


def _open_checkpoint(path: Path, *, kind: Kind | None) -> Weights:
    try:
        reader = CheckpointReader(path.resolve())
        entries, progress = reader.read_metadata().state_dict_metadata, read_progress(path.resolve())
    except DamagedCheckpointError as error:
        raise cannot_be_read(path, error) from None
    tensors = {key: tuple(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    if kind is None or not checkpoint_keys(tensors, ema=kind == "ema"):
        kind = "ema" if checkpoint_keys(tensors, ema=True) else "raw"
    keys = checkpoint_keys(tensors, ema=kind == "ema")
    weights = Weights(
        path,
        {name: tensors[key] for name, key in keys.items()},
        partial(_read_from_checkpoint, path, reader, keys),
        step=progress.step,
        images_seen=progress.images_seen,
        kind=kind,
        name=path.name,
    )
    weights = weights.of_its_run()
    if weights.run is not None:
        return weights
    try:  # copied without its run
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    if not _is_config(config):
        raise ConfigError(f"{path / 'config.json'} is not a configuration of a run")
    return replace(weights, config=config)


def _read_from_checkpoint(path: Path, reader: CheckpointReader, keys: dict[str, str], name: str) -> Tensor:
    entry = reader.read_metadata().state_dict_metadata[keys[name]]
    assert isinstance(entry, TensorStorageMetadata), name
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        load_safely({keys[name]: tensor}, reader, no_dist=True)
    except DamagedCheckpointError as error:
        raise cannot_be_read(path, error) from None
    return tensor


def _is_config(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(section, dict) for section in found.values())


def _names_in(found: Any) -> list[str]:
    """The class names that a file contains; [] if it contains none."""
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else []
