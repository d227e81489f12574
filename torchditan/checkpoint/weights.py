# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`Weights`: a description, and a tensor by its name; and one safetensors file that holds both.

extras/weights/opening.py opens them at other addresses. Opening reads the description only: `Weights.tensor` reads one
tensor, so no more than one is in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchditan.checkpoint.safetensors_files import TensorToWrite, is_pickle, open_file, write_weights
from torchditan.config.loader import from_dict, override
from torchditan.config.options import Config
from torchditan.config.trajectory import differences
from torchditan.errors import ConfigError
from torchditan.models.initialization import fill
from torchditan.models.saved_weights import TRAINING_ONLY, required_names, saved_weights
from torchditan.registry import FORMATS
from torchditan.run.atomic_files import refuse_unwritable, sha256_of
from torchditan.run.directory import OF_NO_RUN, to_json
from torchditan.run.reading import read_config
from torchditan.run.training_progress import Progress

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
        step, images_seen = int(metadata["step"]), int(metadata["images_seen"])
        kind = metadata["weights"]
    except (KeyError, ValueError, RecursionError):
        kind = None
    if kind not in ("ema", "raw") or not is_config(described["config"]):
        raise ConfigError(f"{path} has invalid metadata; export it again")
    return replace(
        weights,
        step=step,
        images_seen=images_seen,
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


def save_weights(out: Path, weights: Weights, *, dtype: torch.dtype) -> None:
    """Write weights with their description to one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    with refuse_unwritable(out):
        write_model_file(out, weights, dtype=dtype)


def export_model(
    path: Path, weights: Mapping[str, Tensor], *, config: dict[str, dict[str, Any]], progress: Progress, kind: Kind
) -> None:
    """Write the weights of a model in training, which may be sharded, to one file in float32. All ranks call it.

    Args:
        path: the file, in the checkpoint folder of the run; an existing one is replaced.
        weights: by name.
        config: the resolved configuration of the run.
        progress: how far the run is.
        kind: whether the weights are averaged.

    Raises:
        OSError: on rank 0, the file cannot be written.
    """
    left = {name: tensor for name, tensor in sorted(weights.items()) if not name.startswith(TRAINING_ONLY)}
    shapes = {name: tuple(tensor.shape) for name, tensor in left.items()}

    def read(name: str) -> Tensor:
        tensor = left.pop(name)
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            own = Weights(path, shapes, read, config, progress.step, progress.images_seen, kind)
            write_model_file(path, own.of_its_run(), dtype=torch.float32)
    finally:
        for name in list(left):  # all ranks gather every weight, also if rank 0 could not write it
            read(name)


def write_model_file(path: Path, weights: Weights, *, dtype: torch.dtype) -> None:
    """`save_weights` that raises the OSError itself."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "config": json.dumps(weights.config),
        "step": str(weights.step),
        "images_seen": str(weights.images_seen),
        "weights": str(weights.kind),
    }
    if weights.git_commit is not None:
        metadata["git_commit"] = weights.git_commit
    if weights.class_names:
        metadata["class_names"] = to_json(weights.class_names).decode()
    entries = [
        TensorToWrite(name, shape, dtype, partial(weights.tensor, name)) for name, shape in weights.shapes.items()
    ]
    write_weights(path, entries, metadata)


def is_config(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(section, dict) for section in found.values())


def _names_in(found: Any) -> list[str]:
    """The class names that a file contains; [] if it contains none."""
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else []
