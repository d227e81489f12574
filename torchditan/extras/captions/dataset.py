# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The training dataset of a model conditioned on captions: latents and embeddings from the cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from torchditan.config.options import Autoencoder as AutoencoderConfig
from torchditan.config.options import Config, cache_folder
from torchditan.data_stream.datasets import CaptionedPixels, CaptionSource, ImageDataset, ListedDataset
from torchditan.data_stream.sample_space import SampleSpace
from torchditan.distributed.process_group import Rank
from torchditan.errors import option_error
from torchditan.extras.autoencoders import Autoencoder
from torchditan.extras.captions.encode import (
    CachedTexts,
    Entries,
    Lookup,
    PipelineEncoders,
    TextEncoder,
    check_options,
    encode_missing,
    find_text_encoder,
    open_image_autoencoder,
)
from torchditan.extras.captions.tokens import beginning, describe_tokens
from torchditan.extras.latents.latent_space import complete_from_autoencoder, decode_latents
from torchditan.extras.published.families import family, patch_size_of
from torchditan.extras.published.stored_weights import find_lora
from torchditan.extras.tensor_cache import TensorCache, hash_of
from torchditan.job.complete import check_embeddings
from torchditan.models import ModelSpec, TextEmbeddings
from torchditan.randomness import uniform
from torchditan.registry import FAMILIES
from torchditan.sampling.drawing import SampleRows

_NUM_PROMPTS = 4
_IMAGES_AT_ONCE = 4
_TEXTS_AT_ONCE = 8
_KEPT_BYTES = 2**27
"""Decoded pixels of a dataset that is not larger stay in memory, in each worker process."""


class LatentSpace(SampleSpace):
    """Cached latents. To decode samples, the autoencoder is opened and freed again afterwards."""

    def __init__(
        self, config: AutoencoderConfig, *, sample_shape: tuple[int, ...], at_once: int, device: torch.device
    ) -> None:
        super().__init__(sample_shape, config)
        self.at_once = at_once
        self.device = device

    def to_pixels(self, samples: torch.Tensor) -> torch.Tensor:
        dims = len(self.sample_shape)
        return decode_latents(self.config, samples, device=self.device, sample_dims=dims, at_once=self.at_once)


Embed = Callable[[str], dict[str, torch.Tensor]]
"""The embeddings of a caption."""


class Captions(ImageDataset):
    """An ImageDataset whose items hold the model's condition: the embeddings of the captions.

    Args:
        source: the captioned images.
        embed: embeds a caption.
        prompts: the prompts of sample grids.
        negative: the negative prompt, or "".
        text_blocks: see `TextEncoder`.
        identity: see `fingerprint`.
    """

    horizontal_flip = False

    def __init__(
        self,
        source: CaptionSource | CaptionedPixels,
        embed: Embed,
        *,
        prompts: SampleRows,
        negative: str,
        text_blocks: int,
        identity: str,
    ) -> None:
        self.source: Any = source
        self.embed = embed
        self.name, self.reading = source.name, source.reading
        self.class_names = []
        self.prompts = prompts
        self.negative = negative
        self.text_blocks = text_blocks
        self.fingerprint = f"captions-{identity}"
        """Fingerprint of images, captions and encoders together. A resume with other data is refused."""
        self.null_tensors = embed("")

    def __len__(self) -> int:
        return len(self.source)

    def rows_of(self, prompts: Sequence[str]) -> SampleRows:
        """Rows of samples of these texts, which are in the cache if there is one."""
        return _rows_of(prompts, self.embed, negative=self.negative)


class CachedCaptions(Captions):
    """Images and captions that were encoded before training.

    Args:
        source, options: see `Captions`.
        texts: embeddings of the captions.
        latents: of the images, by `content_key`. None: the model trains on pixels.
        shift, scale: (C,) normalisation of the latents.
        conditions: tensors that each sample adds to the condition (a video its first frame), by `content_key`.
    """

    def __init__(
        self,
        source: CaptionSource,
        texts: CachedTexts,
        *,
        latents: TensorCache | None,
        shift: torch.Tensor | None,
        scale: torch.Tensor | None,
        conditions: TensorCache | None,
        **options: Any,
    ) -> None:
        super().__init__(source, texts, **options)
        self.latents = latents
        self.conditions = conditions
        self.shift, self.scale = shift, scale
        self.keys = [source.content_key(index) for index in range(len(source))] if latents is not None else None
        self.variants = [source.caption_variants(index) for index in range(len(source))]
        weights = (source.caption_weights(index) for index in range(len(source)))
        self.shares = {index: np.cumsum(each) for index, each in enumerate(weights) if len(set(each)) > 1}
        """Cumulative shares of the variants of each item whose variants are not drawn equally often."""
        self._pixels: dict[int, torch.Tensor] = {}
        common = int(self.groups()[0][0])
        self.sample_shape = tuple(self[common]["sample"].shape)

    def file_sizes(self) -> dict[str, dict[str, int]]:
        return self.source.file_sizes() if isinstance(self.source, ListedDataset) else {}

    def groups(self) -> list[np.ndarray]:
        """Indices of the samples by shape, the most common shape first."""
        shapes: dict[tuple[int, ...], list[int]] = {}
        for index in range(len(self.source)):
            shapes.setdefault(self.source.shape_of(index), []).append(index)
        first = shapes.pop(tuple(self.source.sample_shape))
        return [np.array(indices) for indices in (first, *shapes.values())]

    def __getitem__(self, index: int) -> dict[str, Any]:
        own = {} if self.conditions is None else self.conditions[self.source.content_key(index)]
        return {"sample": self._sample(index), **own, **self.embed(self.variants[index][0])}

    def vary(self, item: dict[str, Any], index: int, *, seed: int, position: int) -> dict[str, Any]:
        """The item at this position of the stream, with one of its captions and of their shuffles if it has several."""
        variants = self.variants[index]
        if len(variants) == 1:
            return item
        drawn = uniform(seed, "caption", [position]).item()
        shares = self.shares.get(index)
        chosen = int(drawn * len(variants)) if shares is None else np.searchsorted(shares[:-1], drawn, side="right")
        return {**item, **self.embed(variants[chosen])}

    def _sample(self, index: int) -> torch.Tensor:
        if self.latents is None:
            return self._decoded(index)
        assert self.keys is not None and self.shift is not None and self.scale is not None
        mean = self.latents[self.keys[index]]["mean"]
        wide = (-1, *[1] * (mean.dim() - 1))
        return (mean - self.shift.view(wide)) * self.scale.view(wide)

    def _decoded(self, index: int) -> torch.Tensor:
        """The pixels. To decode 16 photos of 12 megapixels in each step takes longer than a step of a small model."""
        if index in self._pixels:
            return self._pixels[index]
        pixels: torch.Tensor = self.source[index]["sample"]
        if pixels.nbytes * len(self) <= _KEPT_BYTES:
            self._pixels[index] = pixels
        return pixels


class LookedUpCaptions(Captions):
    """Pixels, whose captions are embedded when an item is read."""

    def __init__(self, source: CaptionedPixels, embed: Lookup, *, prompts: SampleRows, negative: str) -> None:
        identity = hash_of(source.fingerprint or source.name, embed.encoder.identity)[:16]
        text_blocks = embed.encoder.text_blocks
        super().__init__(source, embed, prompts=prompts, negative=negative, text_blocks=text_blocks, identity=identity)
        self.sample_shape = source.sample_shape

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.source[index]
        return {"sample": item["sample"], **self.embed(item["caption"])}


def open_captions(
    config: Config,
    train: CaptionSource | CaptionedPixels,
    validation: CaptionSource | CaptionedPixels | None,
    *,
    rank: Rank,
) -> tuple[ImageDataset, ImageDataset | None, SampleSpace]:
    """Encode the entries that the cache lacks, and open it. All ranks must call it.

    Args:
        config: the job.
        train, validation: captioned images, both of one kind. Pixels that are not encoded need no cache.
        rank: this rank, which encodes its share on its device.

    Returns:
        (training data, held-out data or None, the space of their samples, which completes `[autoencoder]`)

    Raises:
        ConfigError: encoders are missing or do not match the model.
    """
    if config.lora.assistant_path is not None and not config.cache.only:
        find_lora(config.lora.assistant_path)  # checks run before slow work
    check_options(config)
    folder = cache_folder(config)
    encoders = find_text_encoder(config, memory=folder / "files")
    if isinstance(train, CaptionedPixels):
        assert validation is None or isinstance(validation, CaptionedPixels)
        return _open_pixels(config, train, validation, encoders, rank=rank)
    assert not isinstance(validation, CaptionedPixels)
    sources = [source for source in (train, validation) if source is not None]
    own = _own_prompts(sources)
    prompts = config.sampling.prompts or [source.captions[index] for source, index in own]
    captions = {text for source in sources for index in range(len(source)) for text in source.caption_variants(index)}
    negative = config.sampling.negative_prompt
    drawn = {*prompts, *(text for source in sources for text in source.captions if config.evaluation.freq)}
    texts = _encode_texts(config, {*captions, *drawn, negative}, encoders, folder=folder, rank=rank)
    if rank.rank == 0 and not config.job.print_config:
        _report_tokens(encoders, captions=captions, prompts={*config.sampling.prompts, negative})
    latents, autoencoder = _encode_images(config, sources, folder=folder, rank=rank)
    conditions = _encode_conditions(config, sources, encoders, autoencoder, folder=folder, rank=rank)
    rows = _rows_of(
        prompts,
        texts,
        negative=negative,
        conditions=[] if conditions is None else [conditions[source.content_key(index)] for source, index in own],
        references=None if config.sampling.prompts else torch.stack([source[index]["sample"] for source, index in own]),
    )
    opened = [
        CachedCaptions(
            source,
            texts,
            latents=latents,
            shift=None if autoencoder is None else autoencoder.shift,
            scale=None if autoencoder is None else autoencoder.scale,
            conditions=conditions,
            prompts=rows,
            negative=negative,
            text_blocks=encoders.text_blocks,
            identity=_identity(source, encoders, autoencoder),
        )
        for source in sources
    ]
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()  # memory of the encoders, which nothing references any more
    space = SampleSpace(opened[0].sample_shape, config.autoencoder)
    if autoencoder is not None:
        completed = complete_from_autoencoder(config.autoencoder, autoencoder)
        at_once = config.metrics.sample_batch_size
        space = LatentSpace(completed, sample_shape=opened[0].sample_shape, at_once=at_once, device=rank.device)
    return opened[0], opened[1] if len(opened) > 1 else None, space


def _open_pixels(
    config: Config, train: CaptionedPixels, validation: CaptionedPixels | None, encoder: TextEncoder, *, rank: Rank
) -> tuple[ImageDataset, ImageDataset | None, SampleSpace]:
    """Nothing is encoded in advance.

    Raises:
        ConfigError: an option needs encoded images or captions, or the text encoder is not a lookup.
    """
    chosen: dict[str, tuple[object, str]] = {
        "cache.only": (config.cache.only or None, "leave it out"),
        "autoencoder.name": (config.autoencoder.name, "leave it out to train on pixels"),
        "autoencoder.path": (config.autoencoder.path, "leave it out to train on pixels"),
        "model.name": (config.model.name if config.model.name in FAMILIES else None, "must be dit"),
    }
    if not encoder.is_lookup:
        chosen["text_encoder.name"] = (config.text_encoder.name, "must be wordllama, which only looks up embeddings")
    for option, (value, right) in chosen.items():
        if value is not None:
            raise option_error(option, value, f"{train.name} encodes nothing in advance; {right}")
    texts, prompts = Lookup(encoder), config.sampling.prompts
    negative = config.sampling.negative_prompt
    if rank.rank == 0 and not config.job.print_config:
        _report_tokens(encoder, captions=(), prompts={*prompts, negative})
    source = validation or train
    own = {source.caption_of(index): index for index in range(min(_NUM_PROMPTS, len(source)))}
    rows = _rows_of(
        prompts or list(own),
        texts,
        negative=negative,
        references=None if prompts else torch.stack([source[index]["sample"] for index in own.values()]),
    )
    opened = [
        LookedUpCaptions(source, texts, prompts=rows, negative=negative) if source is not None else None
        for source in (train, validation)
    ]
    assert opened[0] is not None
    return opened[0], opened[1], SampleSpace(train.sample_shape, config.autoencoder)


def rows_of_prompts(spec: ModelSpec, config: Config, prompts: Sequence[str]) -> SampleRows:
    """Rows for these texts, of a trained model.

    Raises:
        ConfigError: the encoders are not available or not the model's, or the model also needs a first frame.
    """
    conditioning = cast(TextEmbeddings, spec.conditioning)
    if conditioning.kept & conditioning.tensors.keys():
        right = "this model continues a first frame; export the LoRA, and sample with the model's own pipeline"
        raise option_error("--prompts", list(prompts), right)
    rows = encode_prompts(config, prompts)
    check_embeddings(spec, rows.tensors, config)
    return rows


def encode_prompts(config: Config, prompts: Sequence[str]) -> SampleRows:
    """Rows for these texts, from the encoders of a run or from its cache.

    Raises:
        ConfigError: the encoders are not available.
    """
    folder = cache_folder(config)
    encoders = find_text_encoder(config, memory=folder / "files")
    negative = config.sampling.negative_prompt
    embed: Embed = Lookup(encoders)
    if not encoders.is_lookup:
        embed = _encode_texts(config, {*prompts, negative}, encoders, folder=folder, rank=Rank(0, 0, 1))
    _report_tokens(encoders, captions=(), prompts={*prompts, negative})
    return _rows_of(prompts, embed, negative=negative)


def _report_tokens(encoders: TextEncoder, *, captions: Collection[str], prompts: Collection[str]) -> None:
    """Print what the encoder cuts or does not know: to stdout in a training, else to stderr."""
    tokenizer = encoders.open_tokenizer()
    if tokenizer is not None:
        lines = [
            describe_tokens(texts, tokenizer, what=what)
            for what, texts in (("captions", captions), ("prompts", prompts))
        ]
    else:
        lines = ["text encoder: captions that it cuts are not counted for this encoder"] if captions else []
    for line in filter(None, lines):
        print(line, file=sys.stdout if captions else sys.stderr, flush=True)


def _rows_of(
    prompts: Sequence[str],
    embed: Embed,
    *,
    negative: str,
    conditions: Sequence[dict[str, torch.Tensor]] = (),
    references: torch.Tensor | None = None,
) -> SampleRows:
    """Rows for these texts. If samples add to the condition, row i uses sample i, modulo the number of samples."""
    entries = [
        {**embed(text), **(conditions[number % len(conditions)] if conditions else {})}
        for number, text in enumerate(prompts)
    ]
    return SampleRows(
        names=[beginning(text) for text in prompts],
        numbers=list(range(len(prompts))),
        tensors={name: torch.stack([entry[name] for entry in entries]) for name in entries[0]},
        prompts=list(prompts),
        references=references,
        negative=embed(negative),
    )


def _own_prompts(sources: Sequence[CaptionSource]) -> list[tuple[CaptionSource, int]]:
    """Images of the common shape with different captions, held-out ones if there are any.

    They are spread evenly over the images, because files of one kind often follow each other.
    """
    source, shape = sources[-1], tuple(sources[0].sample_shape)
    chosen: dict[str, int] = {}
    count = len(source.captions)
    step = -(-count // _NUM_PROMPTS)
    for index in (index for first in range(step) for index in range(first, count, step)):
        if len(chosen) < _NUM_PROMPTS and tuple(source.shape_of(index)) == shape:
            chosen.setdefault(source.captions[index], index)
    return [(source, index) for index in chosen.values()] or _own_prompts(sources[:1])


def _encode_texts(
    config: Config, captions: set[str], encoders: TextEncoder, *, folder: Path, rank: Rank
) -> CachedTexts:
    """The cache, after encoding all of these texts and the empty caption."""
    cache = TensorCache(folder / "text", encoders.identity)

    def open_encoder() -> Callable[[list[str]], Entries]:
        encode = encoders.open(rank.device)

        @torch.no_grad()
        def entries(captions: list[str]) -> Entries:
            encoded = encode(captions)
            return {
                hash_of(caption): {name: tensor[row] for name, tensor in encoded.items()}
                for row, caption in enumerate(captions)
            }

        return entries

    encode_missing(
        cache,
        {hash_of(text): text for text in sorted({"", *captions})},
        what="captions",
        rank=rank,
        open_encoder=open_encoder,
        at_once=_TEXTS_AT_ONCE,
        timeout_seconds=config.comm.init_timeout_seconds,
    )
    return CachedTexts(cache)


def _encode_images(
    config: Config, sources: Sequence[CaptionSource], *, folder: Path, rank: Rank
) -> tuple[TensorCache | None, Autoencoder | None]:
    autoencoder = open_image_autoencoder(config, device=rank.device)
    _check_sizes(config, sources, autoencoder)
    if autoencoder is None:
        return None, None
    frames = config.dataset.num_frames
    step = 1 if frames is None else family(config.model.name).temporal_downsampling
    if frames is not None and (frames - 1) % step:
        right = f"must be 1 more than a multiple of {step}, the frames per latent frame"
        raise option_error("dataset.num_frames", frames, right)
    cache = TensorCache(folder / "latents", f"{autoencoder.fingerprint}-{str(autoencoder.dtype).split('.')[-1]}")

    def encode(batch: list[tuple[CaptionSource, int]]) -> Entries:
        images = torch.stack([source[index]["sample"] for source, index in batch])
        means, _ = autoencoder.moments(images)
        return {source.content_key(index): {"mean": mean} for (source, index), mean in zip(batch, means, strict=True)}

    encode_missing(
        cache,
        {source.content_key(index): (source, index) for source in sources for index in range(len(source))},
        what="images",
        rank=rank,
        open_encoder=lambda: encode,
        at_once=_IMAGES_AT_ONCE if frames is None else 1,
        shape_of=lambda item: item[0].shape_of(item[1]),
        timeout_seconds=config.comm.init_timeout_seconds,
    )
    return cache, autoencoder


def _check_sizes(config: Config, sources: Sequence[CaptionSource], autoencoder: Autoencoder | None) -> None:
    """Refuse sample sizes that are not multiples of the autoencoder's downsampling, or buckets not of the patch size.

    Raises:
        ConfigError: names dataset.bucket_step, or dataset.image_size without buckets.
    """
    sizes = sorted({source.shape_of(index)[-2:] for source in sources for index in range(len(source))})
    if config.dataset.aspect_buckets:
        patch = patch_size_of(config.model)[-1] if config.model.name in FAMILIES else config.model.patch_size
        patch *= 1 if autoencoder is None else autoencoder.downsampling
        for height, width in sizes:
            if height % patch or width % patch:
                right = f"makes samples of {height} x {width}; must be a multiple of {patch}, the pixels of a patch"
                raise option_error("dataset.bucket_step", config.dataset.bucket_step, right)
    elif autoencoder is not None:
        for height, width in sizes:
            autoencoder.latent_shape(height, width)


def _encode_conditions(
    config: Config,
    sources: Sequence[CaptionSource],
    encoders: TextEncoder,
    autoencoder: Autoencoder | None,
    *,
    folder: Path,
    rank: Rank,
) -> TensorCache | None:
    """Cache of the tensors that samples add to the condition; None if the model uses none."""
    if config.model.name not in FAMILIES:
        return None
    cls = family(config.model.name)
    if not cls.kept & cls.tensor_names(config.model.flavor):
        return None
    assert isinstance(encoders, PipelineEncoders)
    assert autoencoder is not None and autoencoder.shift is not None and autoencoder.scale is not None
    shift, scale = autoencoder.shift.tolist(), autoencoder.scale.tolist()
    normalization = json.dumps([shift, scale, str(autoencoder.dtype)])
    maker = hash_of(autoencoder.fingerprint, normalization, encoders.identity)[:16]
    cache = TensorCache(folder / "conditions", maker)

    def open_encoder() -> Any:
        pipeline = encoders.open_pipeline(rank.device, of_images=True)

        def encode(batch: list[tuple[CaptionSource, int]]) -> Entries:
            videos = torch.stack([source[index]["sample"] for source, index in batch]).to(rank.device)
            with torch.no_grad():
                encoded = cls.encode_samples(pipeline, autoencoder.encode, videos)
            keys = [source.content_key(index) for source, index in batch]
            return {key: {name: tensor[row] for name, tensor in encoded.items()} for row, key in enumerate(keys)}

        return encode

    encode_missing(
        cache,
        {source.content_key(index): (source, index) for source in sources for index in range(len(source))},
        what="first frames",
        rank=rank,
        open_encoder=open_encoder,
        at_once=1,
        timeout_seconds=config.comm.init_timeout_seconds,
    )
    return cache


def _identity(source: CaptionSource, encoders: TextEncoder, autoencoder: Autoencoder | None) -> str:
    items: list[list[str | float]] = []
    for index in range(len(source)):
        weights = source.caption_weights(index)
        items.append(
            [source.content_key(index), *source.caption_variants(index), *(weights if len(set(weights)) > 1 else [])]
        )
    latents = "pixels" if autoencoder is None else autoencoder.fingerprint
    return hash_of(json.dumps(items), encoders.identity, latents)[:16]
