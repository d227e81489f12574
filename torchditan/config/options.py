# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Every option of TorchDiTan, typed and documented; from TOML and the command line.

One dataclass per TOML section; its docstring heads the section in `--help`, and the string under a field is the help of
that option. rules.py checks the values, loader.py reads TOML files and the command line. Nothing here imports torch.

A `Config` is frozen: `Config.replace` and `Config.fill_in` return a changed copy. Its lists are lists, as in TOML and
JSON, and nothing changes one in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Literal

from torchditan.registry import BLOCKS, MODELS, OBJECTIVES, OPTIMIZERS

FLAVOR_NAMES = ("debugmodel", "DiT-Ti", "DiT-S", "DiT-B", "DiT-L", "DiT-XL", "DiT-1B", "DiT-7B")
"""Sizes of models/dit.py, repeated here because that module imports torch; a test compares them."""


@dataclass(frozen=True)
class Job:
    """Which configuration to run, and where its results go."""

    config_file: str | None = None
    """TOML file of the job: a path, or a name that is looked up in train_configs/."""
    dump_folder: str = "./outputs"
    """Folder that holds the run directories; a run writes to <dump_folder>/<experiment_name>/."""
    description: str = ""
    """A sentence about the run, kept in its config.json."""
    print_config: bool = False
    """Print the resolved configuration and exit without training."""


@dataclass(frozen=True)
class Model:
    """The diffusion transformer: a flavor names its sizes; a preset the options of our own."""

    name: Annotated[str, MODELS] = "dit"
    """Architecture: our own diffusion transformer, or a published one through diffusers (docs/finetune.md)."""
    flavor: str = "DiT-S"
    """Size of the model: DiT-Ti to DiT-7B, FLUX.1-dev, SD3-medium, ...; debugmodel is a tiny one of any."""
    path: str | None = None
    """Published weights: a folder that diffusers saved, a hub name or one .safetensors file. Default: random ones."""
    overrides: list[str] = field(default_factory=list)
    """Other sizes than the flavor's, by the names in its config.json: num_layers=2 num_single_layers=4."""
    preset: Literal["torchditan", "official", "llama3_diffusion"] = "torchditan"
    """Options of the flavor: torchditan's (RoPE, SwiGLU); official (Peebles and Xie 2023); or llama3_diffusion,
    torchditan's with the course project's sizes."""
    block: Annotated[str, BLOCKS] = "dit"
    """The repeated block; dit is attention, then a feed-forward layer. docs/extending.md adds another."""
    patch_size: int = 2
    """Side of a square patch, in pixels or latent cells; image height and width must be multiples of it."""
    input_channels: int | None = None
    """Channels of a sample (3 for RGB pixels, 16 for Cosmos latents); left open, the dataset says."""
    sample_size: list[int] | None = None
    """[Frames,] height and width of what the model sees, pixels or latent cells; filled in from the data."""
    conditioning: Literal["adaln", "in_context"] | None = None
    """How timestep and label enter: adaLN-zero modulation, or extra tokens. Default: the preset's."""
    norm_type: Literal["rmsnorm", "layernorm", "np_layernorm", "fused_rmsnorm"] | None = None
    """Norm of the blocks; np_ has no parameters, fused_rmsnorm means rmsnorm. Default: the preset's."""
    qk_norm: bool | None = None
    """Normalise queries and keys of every head. Default: the preset's."""
    mlp: Literal["swiglu", "gelu"] | None = None
    """Feed-forward layer. Default: the preset's."""
    position: Literal["rope", "sincos"] | None = None
    """Positions: axial 2D rotary embedding, or fixed sin-cos added to the patches. Default: the preset's."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    learn_sigma: bool | None = None
    """Predict a variance and the mean (twice the output channels). Default: the preset's."""
    text: Literal["in_context", "cross_attention"] | None = None
    """Read captions: as tokens before the patches, or by cross-attention in every block (docs/text_to_image.md)."""
    text_tokens: int | None = None
    """Tokens of a caption's embeddings; left open, the captions say."""
    text_width: int | None = None
    """Width of a caption's embeddings; left open, the captions say."""
    pooled_width: int | None = None
    """Width of the vector of a whole caption, which joins the timestep; left open, the captions say."""


@dataclass(frozen=True)
class Dataset:
    """The images to train on; the registry is in data/."""

    dataset_name: str = "digits"
    """Name in the registry: digits, earth, emoji, cifar10, imagenet, imagenet_hub, folder, captions, latents, dummy."""
    root_dir: str | None = None
    """Folder (or file) of the images, where the dataset is not embedded."""
    hub_name: str | None = None
    """Hugging Face dataset to read instead of root_dir, where the dataset supports it."""
    streaming: bool = False
    """Stream the hub dataset in its stored order instead of downloading it first (torchdata, unshuffled)."""
    image_size: list[int] | None = None
    """Height and width of a sample, `32` or `[32, 48]`; left open, the dataset says."""
    num_classes: int | None = None
    """Number of class labels; 0 trains without labels; left open, the dataset says."""
    num_workers: int = 2
    """Processes per rank that decode images (latents: threads that read); 0 does it in the training process."""
    prefetch_factor: int = 4
    """Batches each worker prepares ahead."""
    crop: Literal["center", "adm", "random"] = "center"
    """Part of a larger image: its center; the center resampled as ADM does it; or a place keyed to its number."""
    horizontal_flip: bool | None = None
    """Mirror half of the training images, chosen by position in the stream. Default: the dataset's."""
    image_key: str = "image"
    """Column of the images in parquet files and hub datasets."""
    label_key: str = "label"
    """Column of the labels in parquet files and hub datasets."""
    fingerprint: str | None = None
    """Identity of latents, captions or a folder of images; filled in, and other data is refused on resume."""
    corrupt_images: Literal["error", "skip"] = "error"
    """What an unreadable image does: stop the run naming it, or be replaced by the next one and counted."""
    dummy_fill: Literal["normal", "zeros"] = "normal"
    """Content of the dummy dataset: standard normal, or zeros (which run faster than real data on GPUs)."""
    dummy_size: int = 10000
    """Number of samples in the dummy dataset."""
    caption_key: str = "text"
    """Column of the captions in metadata.jsonl, parquet files and hub datasets (captions)."""
    trigger_word: str | None = None
    """Takes the place of `[trigger]` in captions, and stands before captions that have none (captions)."""
    shuffle_tags: int = 0
    """Variants of each comma-separated caption, its tags shuffled behind the first; 0 keeps captions (captions)."""
    aspect_buckets: bool = False
    """Keep about each image's aspect ratio, at about the area of image_size, one size to a step (captions)."""
    bucket_step: int = 64
    """Sides of a bucket are multiples of it, in pixels (captions)."""
    bucket_order: Literal["epochs", "random"] = "epochs"
    """With aspect_buckets: each image once per epoch (epochs), or a random bucket per step, as older runs (random)."""
    upscale: bool = False
    """Enlarge images that are smaller than their sample, instead of refusing them (captions)."""
    held_out: int | None = None
    """Images kept for validation. Default: 2 percent of 20 or more (captions)."""
    num_frames: int | None = None
    """Read videos instead of images, the first so many frames of each (captions)."""


@dataclass(frozen=True)
class Autoencoder:
    """The latent space: how pixels become latents, and latents pictures."""

    name: str | None = None
    """haar, patch, cosmos, diffusers, or a published one by name (see docs/data.md); left open, the latents say."""
    path: str | None = None
    """Folder of its weights, or its name on the hub. Default: where the latents, its name or model.path say."""
    downsampling: int | None = None
    """Pixels to a latent cell, a side: 2, 4 or 8 for haar (4); the others have their own."""
    online: bool = False
    """Read pixels and encode them on the device at each step, instead of reading encoded latents."""
    sample_posterior: bool = False
    """Draw each latent from the encoder's mean and variance, keyed to its position; else take the mean."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision the autoencoder computes in. Default: what its weights need."""
    shift: list[float] | None = None
    """Normalisation (z - shift) x scale, one number or one per channel. Default: published, or the latents' index."""
    scale: list[float] | None = None
    """See shift."""
    fingerprint: str | None = None
    """Identity of the weights; filled in from the latents, and a decoder that has another one is refused."""


@dataclass(frozen=True)
class Diffusion:
    """The training objective and its timesteps."""

    objective: Annotated[str, OBJECTIVES] = "flow_matching"
    """Flow matching, x_t = (1 - t) noise + t x with velocity target; or ddpm, 1000 levels with noise target (sdxl)."""
    timestep_sampling: Literal["uniform", "logit_normal"] = "logit_normal"
    """Distribution of training timesteps (t = 0 noise, t = 1 data)."""
    logit_normal_mean: float = 0.0
    """Mean of logit(t); below 0 trains more on noisy samples."""
    logit_normal_std: float = 1.0
    """Standard deviation of logit(t)."""
    timestep_shift: float | None = None
    """Shift towards noise, t / (t + shift (1 - t)); 1 is none. Also in sampling. Default: the model's own, or 1."""
    label_dropout: float = 0.1
    """Share of training samples whose label or caption is taken away, for classifier-free guidance."""
    embedded_guidance: float = 1.0
    """Guidance scale given to models that embed one (FLUX.1-dev, HunyuanVideo) while they train."""


@dataclass(frozen=True)
class Training:
    """Batch, steps, precision, and how ranks share the work."""

    batch_size: int | Literal["auto"] | None = None
    """Images per rank in one forward pass; auto searches. Default: the ranks' share of global_batch_size, or 16."""
    global_batch_size: int | None = None
    """Images per optimizer step over all ranks; more than ranks x batch_size accumulates gradients."""
    steps: int = 1000
    """Optimizer steps to train."""
    seed: int = 0
    """Seed of weights, data order, noise, timesteps, label dropout and samples."""
    deterministic: bool = False
    """Use deterministic kernels only; slower, bitwise repeatable."""
    compile: bool = False
    """Compile every transformer block with torch.compile."""
    max_norm: float = 1.0
    """Clip gradients to this global norm; 0 measures the norm and clips nothing."""
    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the parameters in forward and backward, float16 with loss scaling; trained weights stay float32."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are reduced over ranks."""
    data_parallel_replicate_degree: int = 1
    """Ranks that hold copies of the model; equal to the world size it is DDP, between is HSDP."""
    data_parallel_shard_degree: int = -1
    """Ranks the parameters are sharded over (FSDP); -1 takes all ranks left."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    on_nonfinite: Literal["stop", "rollback"] = "stop"
    """On a NaN, or with rollback a spike of the loss: stop, or return to the last checkpoint and skip that data."""
    max_rollbacks: int = 3
    """Give up after so many returns to the same checkpoint."""
    loss_spike_factor: float = 3.0
    """With rollback, a loss above so many times its running mean is a spike; 0 looks for NaN alone."""
    gc_freq: int = 50
    """Collect Python garbage every so many steps, on all ranks at once."""


@dataclass(frozen=True)
class Optimizer:
    """The update of the weights."""

    name: Annotated[str, OPTIMIZERS] = "AdamW"
    """AdamW, or torchao's with 8-bit moments; norms, biases and embeddings get no weight decay."""
    lr: float = 1e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator of the update."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate over the run."""

    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Learning rate after warmup: constant, cosine or linear to the end, or warmup-stable-decay."""
    warmup_steps: int = 0
    """Steps of linear warmup."""
    decay_ratio: float = 0.2
    """Share of all steps that the decay of wsd takes, at the end."""
    min_lr_factor: float = 0.0
    """Learning rate at the end of a decay, as a share of the peak."""
    decay_until: Literal["after_last_step", "last_step"] = "after_last_step"
    """Where a decay ends: one step after the run, so that the last step still learns, or at its last step."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Trade compute for memory: recompute activations in the backward pass."""

    mode: Literal["none", "full", "selective", "fraction"] = "none"
    """Blocks whose activations are recomputed: none, all (full), what selective_ac_option says, or a fraction."""
    selective_ac_option: str = "2"
    """For mode selective: n checkpoints every n-th block, `op` keeps outputs of matmuls and attention."""
    fraction: float = 1.0
    """For mode fraction: the share of the blocks, spread evenly; 0 is none and 1 all of them."""


@dataclass(frozen=True)
class Compile:
    """How torch.compile works, with --training.compile."""

    backend: str = "inductor"
    """Backend of torch.compile."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Effort of the inductor backend; max-autotune tries matmul templates and starts slowly."""


@dataclass(frozen=True)
class Float8:
    """Float8 training of the linear layers, through torchao."""

    enable_float8_linear: bool = False
    """Train the linear layers of the blocks in float8 through torchao (compute capability 8.9 or newer), but for those
    that see one row per image; use it with --training.compile."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Scaling granularity of torchao's float8 training."""
    emulate: bool = False
    """Compute float8 products in higher precision where the device has none, under CUDA's shape rules; slow, for
    tests."""


@dataclass(frozen=True)
class Checkpoint:
    """Saving the run, and continuing it."""

    enable_checkpoint: bool = False
    """Write checkpoints while training; after an interruption the same command continues from the newest one."""
    save_final: bool = True
    """Without enable_checkpoint, save the final state once at the end of the run; false keeps no weights."""
    folder: str = "checkpoint"
    """Name of the folder inside the run directory."""
    interval: int = 500
    """Optimizer steps between checkpoints; the last step is always saved."""
    keep_latest_k: int = 2
    """Checkpoints to keep; 0 keeps all."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write in the background; training waits only for a copy of the state. Pinned memory is for GPUs."""
    initial_load_path: str | None = None
    """Begin a new run with these weights: a .safetensors file, a run directory or a checkpoint of one."""
    initial_load_convention: Literal["torchditan"] | None = None
    """For weights without our configuration; torchditan: t = 0 is noise, t = 1 data, and they predict the velocity."""


@dataclass(frozen=True)
class Metrics:
    """What a run is called, logs and draws while it trains."""

    experiment_name: str | None = None
    """Name of the run and of its folder; default: the name of the config file."""
    log_freq: int = 10
    """Steps between two lines of metrics."""
    enable_color_printing: bool = True
    """Colour the console lines on a terminal."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    save_tb_folder: str = "tensorboard"
    """Folder of the event files inside the run directory."""
    legacy_tags: bool = False
    """Write TensorBoard's scalars under the course project's tags too (wps, im/s, ...; docs/compatibility.md)."""
    enable_wandb: bool = False
    """Log to Weights & Biases; offline if you are not logged in."""
    wandb_project: str = "torchditan"
    """Weights & Biases project."""
    enable_sampling: bool = True
    """Draw sample grids while training."""
    sample_freq: int = 0
    """Steps between two sample grids; 0 draws one at the end."""
    sample_batch_size: int = 16
    """Images sampled at once on each rank."""


@dataclass(frozen=True)
class Sampling:
    """How images are drawn, while training and by scripts/generate.py."""

    sampler: Literal["euler", "heun"] = "euler"
    """ODE solver of first or second order."""
    num_steps: int = 50
    """Solver steps from noise to image; Heun evaluates the model twice in each."""
    guidance_scale: float = 2.0
    """Classifier-free guidance; 1 is none."""
    guidance_interval: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Guidance applies for t between these two (t = 1 is data)."""
    guidance_channels: int | None = None
    """Guide only the first n channels, as the official DiT samples (3); default: all."""
    images_per_class: int = 8
    """Generated images in each row of the grid."""
    max_classes: int = 10
    """Rows of the grid: the first so many classes."""
    use_ema: bool = True
    """Sample from the EMA weights where there are any."""
    prompts: list[str] = field(default_factory=list)
    """Texts to draw, a row of the grid each. Default: the first captions that were held out, or else trained on."""
    at_start: bool = False
    """Draw a grid before the first step too."""
    embedded_guidance: float = 3.5
    """Guidance scale given to models that embed one (FLUX.1-dev, HunyuanVideo) while they are sampled."""


@dataclass(frozen=True)
class TextEncoder:
    """Captions become embeddings once, before the training, and are kept with the latents."""

    path: str | None = None
    """Folder or hub name of the whole pipeline, for its text encoders. Default: model.path."""
    max_length: int | None = None
    """Tokens of a caption. Default: the model's own."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision the text encoders compute in."""


@dataclass(frozen=True)
class Cache:
    """Latents and text embeddings of captioned images, encoded once."""

    folder: str | None = None
    """Where they are kept; runs share it. Default: <dump_folder>/cache."""
    only: bool = False
    """Encode what is missing and end: `--cache_only`."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters instead of training all weights of a published model."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float | None = None
    """The adapters' update is scaled by alpha / rank. Default: the rank."""
    target_modules: list[str] = field(default_factory=list)
    """Layers that get an adapter, as endings of their names or regular expressions. Default: the attention's."""
    assistant_path: str | None = None
    """A LoRA that is active in training and off in sampling: FLUX.1-schnell's training adapter."""


@dataclass(frozen=True)
class Quantize:
    """How the frozen weights under a LoRA are stored."""

    base: Literal["float32", "bfloat16", "int8"] = "float32"
    """Of the blocks' frozen linear layers; int8 halves bfloat16 again, with one scale per row."""


@dataclass(frozen=True)
class EMA:
    """The average of the weights that samples are drawn from."""

    enable: bool = True
    """Keep an exponential moving average of the weights, for sampling and export."""
    decay: float = 0.9999
    """Decay per step once warmed up; .9999 suits a global batch of 256."""
    warmup: bool = True
    """Start with a short average: decay min(decay, (1 + step) / (10 + step))."""


@dataclass(frozen=True)
class Validation:
    """A loss on held-out images, comparable between runs."""

    freq: int = 0
    """Steps between two validation losses on held-out images with fixed noise and timesteps; 0 is never."""
    num_images: int = 256
    """Held-out images each validation uses."""


@dataclass(frozen=True)
class Profiling:
    """Traces and memory snapshots of the running job."""

    enable_profiling: bool = False
    """Write torch profiler traces."""
    save_traces_folder: str = "profile_trace"
    """Folder of the traces inside the run directory."""
    profile_freq: int = 100
    """Steps between two traced steps."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots, every profile_freq steps and on running out of memory."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots inside the run directory."""


@dataclass(frozen=True)
class Comm:
    """How long ranks wait for each other."""

    init_timeout_seconds: int = 600
    """Timeout of collectives until the first step is done (compilation is slow), and of saving."""
    train_timeout_seconds: int = 100
    """Timeout of collectives afterwards."""
    trace_buf_size: int = 2000
    """Collectives that torch's Flight Recorder keeps, to be written when a rank is stuck; 0 keeps none."""


@dataclass(frozen=True)
class Autotune:
    """The search behind --training.batch_size=auto: trial runs of a few steps, each in processes of its own."""

    goal: Literal["largest", "fastest"] = "largest"
    """The largest batch that fits, or the one of those tried that gives the most images per second."""
    memory_margin: float = 0.05
    """Share of the device's memory that the chosen batch leaves free."""
    batch_size_multiple: int = 1
    """Batch sizes tried are multiples of this; 16 suits float8."""
    max_batch_size: int = 4096
    """Largest batch size tried, per rank."""
    steps: int = 6
    """Optimizer steps of a trial."""
    memory_limit_gib: float | None = None
    """Memory that a rank may take on a CPU, where nothing else ends the search before the machine does."""


@dataclass(frozen=True)
class Config:
    """Every section, in the order of --help."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    dataset: Dataset = field(default_factory=Dataset)
    autoencoder: Autoencoder = field(default_factory=Autoencoder)
    diffusion: Diffusion = field(default_factory=Diffusion)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    lora: LoRA = field(default_factory=LoRA)
    quantize: Quantize = field(default_factory=Quantize)
    text_encoder: TextEncoder = field(default_factory=TextEncoder)
    cache: Cache = field(default_factory=Cache)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    ema: EMA = field(default_factory=EMA)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    sampling: Sampling = field(default_factory=Sampling)
    validation: Validation = field(default_factory=Validation)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    autotune: Autotune = field(default_factory=Autotune)

    def replace(self, values: Mapping[str, Any]) -> Config:
        """A copy with other values: `config.replace({"training.batch_size": 8})`; values are not checked.

        Raises:
            AttributeError, TypeError: a name is not an option.
        """
        sections: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        changed = {name: dataclasses.replace(getattr(self, name), **keys) for name, keys in sections.items()}
        return dataclasses.replace(self, **changed)

    def fill_in(self, values: Mapping[str, Any]) -> Config:
        """A copy with these values where the option is left open (None): `config.fill_in({"model.text_width": 64})`."""
        return self.replace({name: value for name, value in values.items() if attrgetter(name)(self) is None})


def dataset_channels(config: Config) -> int | None:
    """Channels to ask of the dataset: the model's, unless its samples are encoded at each step."""
    if config.autoencoder.online:
        return 3 if config.dataset.dataset_name == "dummy" else None
    return config.model.input_channels


def flatten(config: Config) -> dict[str, Any]:
    """`{"training.steps": 1000, ...}`, in the order of --help."""
    return {
        f"{section}.{key}": value for section, keys in dataclasses.asdict(config).items() for key, value in keys.items()
    }
