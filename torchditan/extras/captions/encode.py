# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encodes captioned images to latents and text embeddings, once: only entries that the cache lacks are encoded.

Notable:
- the key of an entry selects the rank that encodes it. Each rank then waits for the files of the others;
- an encoder is opened only if entries are missing. Encoders run one after the other and are freed before the model is
  built;
- text goes through `encode_prompt` of the pipeline, so embeddings are bitwise equal to the pipeline's.
"""

from __future__ import annotations

import functools
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from torchditan.config.options import Config
from torchditan.distributed.process_group import Rank
from torchditan.errors import ConfigError, first_line, option_error
from torchditan.extras.autoencoders import Autoencoder, open_autoencoder
from torchditan.extras.captions.tokens import Tokenizer, tokenizer_of_transformers
from torchditan.extras.published.base import require
from torchditan.extras.published.families import PublishedModel, family
from torchditan.extras.published.stored_weights import HOW_TO_GET
from torchditan.extras.tensor_cache import TensorCache, hash_of, identity_of_files
from torchditan.registry import FAMILIES, TEXT_ENCODERS, build, registered, resolve
from torchditan.run.hub import fetch
from torchditan.run.progress import report_progress

TEXT_PARTS = ("text_encoder", "tokenizer", "processor", "image_encoder", "image_processor")
"""Prefixes of the folders of a saved pipeline that compute conditions."""
_ENTRIES_PER_FILE = 64
_SECONDS_PER_FILE = 30.0
"""Longest time between two files: other ranks wait for them, and a killed run loses unwritten entries."""
_POLL_SECONDS = 0.5
_KEPT_CAPTIONS = 2048
"""Embeddings that a lookup keeps, in each worker of a data loader."""

Entries = dict[str, dict[str, torch.Tensor]]


class TextEncoder:
    """Encodes captions, once before training. The cache stores the embeddings under `identity`."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("find", "open")

    identity: str
    """Of the encoder, its weights and its options: embeddings of another identity are not used."""
    text_blocks: ClassVar[int] = 0
    """Default of `model.text_blocks`. Embeddings of single words, which do not depend on the others, need some."""
    is_lookup: ClassVar[bool] = False
    """Whether encoding takes no longer than reading the cache. Captions without end need that (`Lookup`)."""
    is_for_own_models: ClassVar[bool] = False
    """Whether published models, which read the embeddings of their own pipeline, refuse it."""

    @classmethod
    def find(cls, config: Config, *, memory: Path) -> TextEncoder:
        """Check that the encoder exists, without opening it. Further parameters are options after its name.

        Args:
            config: the job.
            memory: folder in which checksums of large files may be remembered (`identity_of_files`).

        Raises:
            ConfigError: it does not exist, or does not match the model.
        """
        raise NotImplementedError

    def open(self, device: torch.device) -> Callable[[list[str]], dict[str, torch.Tensor]]:
        """Open it, on the first rank that has captions to encode.

        Returns:
            A function from n captions to their tensors by name, called without gradients: `prompt_embeds` (n, L, D),
            and optionally `pooled_prompt_embeds` (n, D') and a mask `prompt_attention_mask` (n, L), false for padding.
            L is the same for all captions. "" is the empty caption, for guidance.
        """
        raise NotImplementedError

    def open_tokenizer(self) -> Tokenizer | None:
        """Open only what counts the tokens of captions, to report those that are cut. None: they are not counted."""
        return None


class Lookup:
    """Embeddings by caption, computed when they are read. Each worker of a data loader opens the encoder itself."""

    def __init__(self, encoder: TextEncoder) -> None:
        self.encoder = encoder
        self._embed: Callable[[str], dict[str, torch.Tensor]] | None = None

    def __call__(self, caption: str) -> dict[str, torch.Tensor]:
        if self._embed is None:
            self._embed = self._open()
        return self._embed(caption)

    def _open(self) -> Callable[[str], dict[str, torch.Tensor]]:
        encode = self.encoder.open(torch.device("cpu"))

        @functools.lru_cache(_KEPT_CAPTIONS)
        @torch.no_grad()
        def embed(caption: str) -> dict[str, torch.Tensor]:
            return {name: tensor[0] for name, tensor in encode([caption]).items()}

        return embed

    def __getstate__(self) -> dict[str, Any]:
        return {"encoder": self.encoder, "_embed": None}


class CachedTexts:
    """Embeddings by caption, encoded before and read from a cache."""

    def __init__(self, cache: TensorCache) -> None:
        self.cache = cache

    def __call__(self, caption: str) -> dict[str, torch.Tensor]:
        return self.cache[hash_of(caption)]


class PipelineEncoders(TextEncoder):
    """The text encoders of one diffusers pipeline, through the `encode_prompt` of its family.

    Args:
        cls: family of the pipeline.
        folder: the saved pipeline.
        pipeline_class: class of diffusers that encodes.
        max_length: tokens of a caption.
        dtype: dtype of the encoders and of the stored embeddings.
        memory: folder in which checksums of large files are remembered.
    """

    def __init__(
        self,
        cls: type[PublishedModel],
        folder: Path,
        *,
        pipeline_class: str,
        max_length: int,
        dtype: torch.dtype,
        memory: Path,
    ) -> None:
        self.cls = cls
        self.pipeline_class = pipeline_class
        self.folder = folder
        self.max_length = max_length
        self.dtype = dtype
        parts = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name.startswith(TEXT_PARTS)]
        identities = [f"{path.name} {identity_of_files(path, memory=memory)}" for path in parts]
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8-sig"))
        # True, as in the published pipelines, adds nothing, so that existing caches stay valid.
        if index.get("force_zeros_for_empty_prompt") is False:
            identities.append("force_zeros_for_empty_prompt false")
        self.identity = hash_of(pipeline_class, str(max_length), str(dtype), *identities)[:16]

    @classmethod
    def find(cls, config: Config, *, memory: Path) -> PipelineEncoders:
        """The pipeline at `text_encoder.path` or `model.path`. A published model needs that of its flavor."""
        option = "text_encoder.path" if config.text_encoder.path is not None else "model.path"
        place = config.text_encoder.path or config.model.path
        if place is None:
            right = "must be given to encode captions: a folder or hub name of a whole pipeline"
            raise option_error("text_encoder.path", None, right)
        folder = folder_of(place, patterns=["model_index.json", "scheduler/*", *(f"{part}*/*" for part in TEXT_PARTS)])
        if not (folder / "model_index.json").is_file():
            right = f"{'is not a saved pipeline' if folder.exists() else 'does not exist'}; {HOW_TO_GET}"
            if option == "model.path" and folder.exists():
                right = "holds only the transformer; give the whole pipeline as --text_encoder.path"
            raise option_error(option, place, right)
        found = json.loads((folder / "model_index.json").read_text(encoding="utf-8-sig")).get("_class_name")
        own = config.model.name not in FAMILIES
        # The sizes of our own model define no caption length: captions have as many tokens as a published model's.
        classes = {
            flavor.pipeline_class or each.pipeline_class: (each, flavor)
            for each in map(family, FAMILIES if own else [config.model.name])
            for name, flavor in each.flavors.items()
            if own or name == config.model.flavor
        }
        if found not in classes:
            right = f"is a {found}, whose encoders do not match {config.model.name}; must be {' or '.join(classes)}"
            raise option_error(option, place, right)
        of_pipeline, flavor = classes[found]
        return cls(
            of_pipeline,
            folder,
            pipeline_class=found,
            max_length=config.text_encoder.max_length or flavor.text_length,
            dtype=getattr(torch, config.text_encoder.dtype),
            memory=memory,
        )

    def open(self, device: torch.device) -> Callable[[list[str]], dict[str, torch.Tensor]]:
        pipeline = self.open_pipeline(device)

        def encode(captions: list[str]) -> dict[str, torch.Tensor]:
            return self.cls.encode_captions(pipeline, captions, max_length=self.max_length)

        return encode

    def open_tokenizer(self) -> Tokenizer | None:
        name = self.cls.caption_tokenizer
        if name is None or not (self.folder / name).is_dir():
            return None
        silence_libraries("transformers")
        tokenizer = require("transformers").AutoTokenizer.from_pretrained(self.folder / name, local_files_only=True)
        length = min(self.max_length, tokenizer.model_max_length)
        return tokenizer_of_transformers(tokenizer, max_length=length)

    def open_pipeline(self, device: torch.device, *, of_images: bool = False) -> Any:
        """The pipeline without transformer and autoencoder: with its text encoders, or with its image encoders.

        Raises:
            ConfigError: the pipeline cannot be opened.
        """
        require("transformers")
        pipeline_class = getattr(require("diffusers"), self.pipeline_class)
        left_out: dict[str, None] = {self.cls.subfolder: None, "vae": None}
        parts = [path.name for path in self.folder.iterdir() if path.name.startswith(TEXT_PARTS)]
        left_out |= {name: None for name in parts if name.startswith("image_") != of_images}
        dtype = torch.float32 if of_images else self.dtype  # image encoders take float32 images
        silence_libraries("diffusers", "transformers")
        try:
            pipeline = pipeline_class.from_pretrained(self.folder, torch_dtype=dtype, **left_out)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
            right = f"cannot be opened: {first_line(error)}"
            raise option_error("text_encoder.path", str(self.folder), right) from error
        pipeline.set_progress_bar_config(disable=True)
        return pipeline.to(device)


class AutomaticEncoder(TextEncoder):
    """What is at `text_encoder.path`: a pipeline or a single encoder. Without a path it is wordllama."""

    @classmethod
    def find(cls, config: Config, *, memory: Path) -> TextEncoder:
        place = config.text_encoder.path
        if config.model.name in FAMILIES:
            kind = "pipeline"
        elif place is None:
            kind = "wordllama"
        else:
            folder = folder_of(place, patterns=["model_index.json", "config.json"])
            kind = "pipeline" if (folder / "model_index.json").is_file() else "transformers"
        found: TextEncoder = registered(TEXT_ENCODERS, kind).find(config, memory=memory)
        return found

    def open(self, device: torch.device) -> Callable[[list[str]], dict[str, torch.Tensor]]:
        raise AssertionError("`find` returns another encoder")


def folder_of(place: str, *, patterns: Sequence[str]) -> Path:
    """The folder at `text_encoder.path`; for a hub name, the files of these patterns are fetched first."""
    return fetch(place, patterns=patterns, what="text encoders", option="text_encoder.path")


def silence_libraries(*names: str) -> None:
    """Their progress bars and warnings appear for every file and caption; ours is one line."""
    for name in names:
        logging = require(f"{name}.utils.logging")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    # Older versions use the name torch_dtype.
    warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated")


def find_text_encoder(config: Config, *, memory: Path) -> TextEncoder:
    """The encoder of `text_encoder.name`."""
    option, text = "text_encoder.name", config.text_encoder.name
    kind, options = resolve(TEXT_ENCODERS, option, text)
    if config.model.name in FAMILIES and kind.is_for_own_models:
        right = f"{config.model.name} reads the embeddings of its own pipeline; must be pipeline or auto"
        raise option_error(option, text, right)
    encoder: TextEncoder = build(kind.find, option, text, config, memory=memory, **options)
    return encoder


def encode_missing(
    cache: TensorCache,
    wanted: dict[str, Any],
    *,
    what: str,
    rank: Rank,
    open_encoder: Callable[[], Callable[[list[Any]], Entries]],
    at_once: int,
    shape_of: Callable[[Any], tuple[int, ...]] = lambda item: (),
    timeout_seconds: float,
) -> None:
    """Encode every wanted entry that the cache lacks. All ranks must call it.

    Args:
        wanted: key -> item to encode.
        what: name of the items in the progress line: "captions".
        open_encoder: returns a function that encodes one batch; called only if this rank has entries to encode.
        at_once: items in a batch, at most.
        shape_of: of an item; the items of a batch have one shape.
        timeout_seconds: longest wait for another rank without any progress.
    """
    cache.refresh()
    missing = {key: value for key, value in wanted.items() if key not in cache}
    mine = [value for key, value in missing.items() if int(key[:8], 16) % rank.world_size == rank.rank]
    if mine:
        with report_progress(f"opening the encoder of {what}"):
            encode = open_encoder()
        start = written_at = time.perf_counter()
        pending: Entries = {}
        with report_progress(f"encoding {what}", total=len(mine), unit=what) as advance:
            for batch in _batches_of_one_shape(mine, shape_of, at_once):
                try:
                    pending.update(encode(batch))
                except ConfigError as error:
                    error.is_of_this_rank = True
                    raise
                if len(pending) >= _ENTRIES_PER_FILE or time.perf_counter() - written_at > _SECONDS_PER_FILE:
                    cache.write(pending)
                    pending, written_at = {}, time.perf_counter()
                advance(len(batch))
            if pending:
                cache.write(pending)
        if rank.rank == 0:
            rate = len(mine) / (time.perf_counter() - start)
            print(f"encoding {what}: {len(mine)}/{len(mine)}, {rate:.1f}/s", flush=True)
    with report_progress(f"waiting for {what} of the other ranks"):
        _wait_for_others(cache, missing, what=what, timeout_seconds=timeout_seconds)


def _wait_for_others(cache: TensorCache, wanted: dict[str, Any], *, what: str, timeout_seconds: float) -> None:
    seen, since = -1, time.monotonic()
    while True:
        left = [key for key in wanted if key not in cache]
        if not left:
            return
        if len(left) != seen:
            seen, since = len(left), time.monotonic()
        if time.monotonic() - since > timeout_seconds:
            raise RuntimeError(f"{len(left)} {what} were not encoded by the other ranks in {timeout_seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
        cache.refresh()


def open_image_autoencoder(config: Config, *, device: torch.device) -> Autoencoder | None:
    """The autoencoder of the pipeline, or the one that `[autoencoder]` names. None: the model trains on pixels.

    Raises:
        ConfigError: it cannot be opened, or does not publish a normalisation.
    """
    section = config.autoencoder
    if section.name is None:
        if section.path is None and config.model.name not in FAMILIES:
            return None
        place = section.path or config.text_encoder.path or config.model.path
        if place is None or Path(place).expanduser().is_file():
            right = "must be given to encode images: a saved pipeline, or the folder of its vae"
            raise option_error("autoencoder.path", place, right)
        section = replace(section, name="diffusers", path=place)
    autoencoder = open_autoencoder(section, device=device)
    if autoencoder.shift is None:
        right = f"{autoencoder.name} publishes no normalisation; set shift and scale"
        raise option_error("autoencoder.scale", None, right)
    return autoencoder


def _batches_of_one_shape(
    items: Sequence[Any], shape_of: Callable[[Any], tuple[int, ...]], size: int
) -> list[list[Any]]:
    by_shape: dict[tuple[int, ...], list[Any]] = {}
    for item in items:
        by_shape.setdefault(shape_of(item), []).append(item)
    return [same[i : i + size] for same in by_shape.values() for i in range(0, len(same), size)]


def check_options(config: Config) -> None:
    """Refuse options that do not apply to captioned images."""
    if config.model.name not in FAMILIES and config.model.text is None:
        right = "must be in_context, cross_attention or joint to train on captions; or choose a dataset with labels"
        raise option_error("model.text", None, right)
    encoded = "captioned images are encoded once, before training"
    for option, right in (
        ("autoencoder.online", f"{encoded}; leave it out"),
        ("autoencoder.sample_posterior", f"{encoded}, to the mean of their latents; leave it out"),
        ("dataset.horizontal_flip", "encoded images cannot be mirrored; add mirrored images, or leave it out"),
        ("dataset.streaming", f"{encoded}, which needs all of them; leave it out"),
    ):
        if attrgetter(option)(config):
            raise option_error(option, True, right)
