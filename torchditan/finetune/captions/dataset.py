# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The training dataset of a model conditioned on captions: latents and embeddings from the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchditan.autoencoders import Autoencoder
from torchditan.config.errors import option_error
from torchditan.config.options import Autoencoder as AutoencoderConfig
from torchditan.config.options import Config
from torchditan.data_stream.datasets import CaptionSource, ImageDataset
from torchditan.distributed.process_group import Rank
from torchditan.evaluation.sampler import SampleRows
from torchditan.finetune.captions.encode import (
    Entries,
    PipelineEncoders,
    TextEncoder,
    batches_of_one_shape,
    check_options,
    encode_missing,
    find_text_encoder,
    open_image_autoencoder,
)
from torchditan.finetune.published import family_of, patch_size_of
from torchditan.finetune.published.stored_weights import find_lora
from torchditan.latents.latent_space import complete_from_autoencoder, decode_latents
from torchditan.latents.sample_space import SampleSpace
from torchditan.randomness import uniform
from torchditan.registry import FAMILIES
from torchditan.run.tensor_cache import TensorCache, hash_of

_NUM_PROMPTS = 4
_IMAGES_AT_ONCE = 4
_TEXTS_AT_ONCE = 8


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


class CachedCaptions(ImageDataset):
    """An ImageDataset whose items hold the model's condition: the embeddings of the captions.

    Args:
        source: the captioned images.
        latents: their latents by `content_key`. None: the model trains on pixels.
        shift, scale: (C,) normalisation of the latents.
        texts: embeddings by the hash of the caption.
        conditions: tensors that each sample adds to the condition (a video its first frame), by `content_key`.
        prompts: the prompts of sample grids.
        identity: see `fingerprint`.
    """

    horizontal_flip = False

    def __init__(
        self,
        source: CaptionSource,
        *,
        latents: TensorCache | None,
        shift: torch.Tensor | None,
        scale: torch.Tensor | None,
        texts: TensorCache,
        conditions: TensorCache | None,
        prompts: SampleRows,
        identity: str,
    ) -> None:
        self.source = source
        self.name = source.name
        self.class_names = []
        self.latents = latents
        self.texts = texts
        self.conditions = conditions
        self.shift, self.scale = shift, scale
        self.prompts = prompts
        self.fingerprint = identity
        """Fingerprint of images, captions and encoders together. A resume with other data is refused."""
        self.null_tensors = texts[hash_of("")]
        self.keys = [source.content_key(index) for index in range(len(source))] if latents is not None else None
        self.variants = [[hash_of(text) for text in source.caption_variants(index)] for index in range(len(source))]
        common = int(self.groups()[0][0])
        self.sample_shape = tuple(self[common]["sample"].shape)

    def __len__(self) -> int:
        return len(self.source)

    def groups(self) -> list[np.ndarray]:
        """Indices of the samples by shape, the most common shape first."""
        shapes: dict[tuple[int, ...], list[int]] = {}
        for index in range(len(self.source)):
            shapes.setdefault(self.source.shape_of(index), []).append(index)
        first = shapes.pop(tuple(self.source.sample_shape))
        return [np.array(indices) for indices in (first, *shapes.values())]

    def __getitem__(self, index: int) -> dict[str, Any]:
        own = {} if self.conditions is None else self.conditions[self.source.content_key(index)]
        return {"sample": self._sample(index), **own, **self.texts[self.variants[index][0]]}

    def vary(self, item: dict[str, Any], index: int, *, seed: int, position: int) -> dict[str, Any]:
        """The item at this position of the stream, with one of the shuffles of its caption if it has some."""
        variants = self.variants[index]
        if len(variants) == 1:
            return item
        chosen = int(uniform(seed, "caption", [position]).item() * len(variants))
        return {**item, **self.texts[variants[chosen]]}

    def _sample(self, index: int) -> torch.Tensor:
        if self.latents is None:
            return self.source[index]["sample"]
        assert self.keys is not None and self.shift is not None and self.scale is not None
        mean = self.latents[self.keys[index]]["mean"]
        wide = (-1, *[1] * (mean.dim() - 1))
        return (mean - self.shift.view(wide)) * self.scale.view(wide)


def open_captions(
    config: Config, train: CaptionSource, validation: CaptionSource | None, *, rank: Rank
) -> tuple[CachedCaptions, CachedCaptions | None, SampleSpace]:
    """Encode the entries that the cache lacks, and open it. All ranks must call it.

    Args:
        config: the job.
        train, validation: captioned images.
        rank: this rank, which encodes its share on its device.

    Returns:
        (training data, held-out data or None, the space of their samples, which completes `[autoencoder]`)

    Raises:
        ConfigError: encoders are missing or do not match the model.
    """
    if config.lora.assistant_path is not None and not config.cache.only:
        find_lora(config.lora.assistant_path)  # checks run before slow work
    check_options(config)
    folder = _cache_folder(config)
    encoders = find_text_encoder(config, memory=folder / "files")
    sources = [source for source in (train, validation) if source is not None]
    own = _own_prompts(sources)
    prompts = config.sampling.prompts or [text for text, _, _ in own]
    captions = {text for source in sources for index in range(len(source)) for text in source.caption_variants(index)}
    texts = _encode_texts(config, {*captions, *prompts}, encoders, folder=folder, rank=rank)
    latents, autoencoder = _encode_images(config, sources, folder=folder, rank=rank)
    conditions = _encode_conditions(config, sources, encoders, autoencoder, folder=folder, rank=rank)
    rows = _rows_of(
        prompts,
        texts,
        conditions=[] if conditions is None else [conditions[key] for _, _, key in own],
        references=None if config.sampling.prompts else torch.stack([image() for _, image, _ in own]),
    )
    opened = [
        CachedCaptions(
            source,
            latents=latents,
            shift=None if autoencoder is None else autoencoder.shift,
            scale=None if autoencoder is None else autoencoder.scale,
            texts=texts,
            conditions=conditions,
            prompts=rows,
            identity=_identity(source, encoders, autoencoder),
        )
        for source in sources
    ]
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()  # memory of the encoders, which nothing references any more
    space = _space(config, autoencoder, sample_shape=opened[0].sample_shape, device=rank.device)
    return opened[0], opened[1] if len(opened) > 1 else None, space


def _space(
    config: Config, autoencoder: Autoencoder | None, *, sample_shape: tuple[int, ...], device: torch.device
) -> SampleSpace:
    if autoencoder is None:
        return SampleSpace(sample_shape, config.autoencoder)
    return LatentSpace(
        complete_from_autoencoder(config.autoencoder, autoencoder),
        sample_shape=sample_shape,
        at_once=config.metrics.sample_batch_size,
        device=device,
    )


def encode_prompts(config: Config, prompts: Sequence[str], *, rank: Rank) -> tuple[SampleRows, dict[str, torch.Tensor]]:
    """Rows for these texts and the embeddings of the empty caption, from the encoders of a run or from its cache.

    Raises:
        ConfigError: the encoders are not available.
    """
    folder = _cache_folder(config)
    encoders = find_text_encoder(config, memory=folder / "files")
    texts = _encode_texts(config, set(prompts), encoders, folder=folder, rank=rank)
    return _rows_of(prompts, texts), texts[hash_of("")]


def _cache_folder(config: Config) -> Path:
    return Path(config.cache.folder or Path(config.job.dump_folder) / "cache").expanduser()


def _rows_of(
    prompts: Sequence[str],
    texts: TensorCache,
    *,
    conditions: Sequence[dict[str, torch.Tensor]] = (),
    references: torch.Tensor | None = None,
) -> SampleRows:
    """Rows for these texts. If samples add to the condition, row i uses sample i, modulo the number of samples."""
    entries = [
        {**texts[hash_of(text)], **(conditions[number % len(conditions)] if conditions else {})}
        for number, text in enumerate(prompts)
    ]
    return SampleRows(
        names=[_short(text) for text in prompts],
        numbers=list(range(len(prompts))),
        tensors=_stack(entries),
        references=references,
    )


def _own_prompts(sources: Sequence[CaptionSource]) -> list[tuple[str, Any, str]]:
    """(caption, source of its image, content key) of the first images of the common shape, held-out images if any."""
    source, shape = sources[-1], tuple(sources[0].sample_shape)
    chosen: dict[str, int] = {}
    for index, caption in enumerate(source.captions):
        if len(chosen) == _NUM_PROMPTS:
            break
        if tuple(source.shape_of(index)) == shape:
            chosen.setdefault(caption, index)
    if not chosen:
        return _own_prompts(sources[:1])
    return [
        (text, lambda index=index: source[index]["sample"], source.content_key(index)) for text, index in chosen.items()
    ]


def _encode_texts(
    config: Config, captions: set[str], encoders: TextEncoder, *, folder: Path, rank: Rank
) -> TensorCache:
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
        batch_of=lambda texts: [list(texts[i : i + _TEXTS_AT_ONCE]) for i in range(0, len(texts), _TEXTS_AT_ONCE)],
        timeout_seconds=config.comm.init_timeout_seconds,
    )
    return cache


def _encode_images(
    config: Config, sources: Sequence[CaptionSource], *, folder: Path, rank: Rank
) -> tuple[TensorCache | None, Autoencoder | None]:
    autoencoder = open_image_autoencoder(config, device=rank.device)
    _check_sizes(config, sources, autoencoder)
    if autoencoder is None:
        return None, None
    if (frames := config.dataset.num_frames) is not None:
        step = family_of(config).temporal_downsampling
        if (frames - 1) % step:
            right = f"must be 1 more than a multiple of {step}, the frames per latent frame"
            raise option_error("dataset.num_frames", frames, right)
    cache = TensorCache(folder / "latents", f"{autoencoder.fingerprint}-{str(autoencoder.dtype).split('.')[-1]}")

    at_once = _IMAGES_AT_ONCE if config.dataset.num_frames is None else 1

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
        batch_of=lambda items: batches_of_one_shape(items, lambda item: item[0].shape_of(item[1]), at_once),
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
    cls = family_of(config)
    if not cls.kept & cls.tensor_names(config.model.flavor):
        return None
    if not isinstance(encoders, PipelineEncoders):
        right = f"{cls.name} also needs the image encoders of its pipeline; must be pipeline"
        raise option_error("text_encoder.name", config.text_encoder.name, right)
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
        batch_of=lambda items: [[item] for item in items],
        timeout_seconds=config.comm.init_timeout_seconds,
    )
    return cache


def _identity(source: CaptionSource, encoders: TextEncoder, autoencoder: Autoencoder | None) -> str:
    items = [[source.content_key(index), *source.caption_variants(index)] for index in range(len(source))]
    latents = "pixels" if autoencoder is None else autoencoder.fingerprint
    return f"captions-{hash_of(json.dumps(items), encoders.identity, latents)[:16]}"


def _stack(entries: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}


def _short(text: str, *, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
