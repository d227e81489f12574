# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Every option of TorchDiTan with its type, default and help text.

Each TOML section is a dataclass. Its docstring heads the section in `--help`, and the string under a field is the help
text of that option. Its annotation says what its value must be and what it needs (declarations.py); rules.py checks
several options together. schema.py reads the annotations, so they are not strings here.

This file must not import torch.

A `Config` is frozen: `Config.replace` and `Config.fill_in` return a changed copy. Its sequences are lists, as in TOML
and JSON. Do not modify them in place.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from torchditan.config.declarations import (
    Above,
    AtLeast,
    Below,
    Between,
    Idle,
    Length,
    Needs,
    OtherWords,
    Rule,
    is_inner_folder,
    is_plain_name,
)
from torchditan.registry import (
    AUTOENCODERS,
    BLOCKS,
    DATASETS,
    FAMILIES,
    INGREDIENTS,
    METERS,
    METRICS,
    MODELS,
    OBJECTIVES,
    OPTIMIZERS,
    SAMPLERS,
    SCHEDULES,
    TEXT_ENCODERS,
)

FLAVOR_NAMES = ("debugmodel", "DiT-Mi", "DiT-Ti", "DiT-S", "DiT-B", "DiT-L", "DiT-XL", "DiT-1B", "DiT-7B")
"""Flavors of models/dit.py, repeated here because that module imports torch. A test compares both lists."""
FLAVORS_OF = {"dit": FLAVOR_NAMES, "ddt": FLAVOR_NAMES}
"""Architectures whose flavors are checked before torch is imported; others check their own."""

SEED = Rule("at least 0, below 2^63", lambda value: 0 <= value < 2**63)
DEGREE = Rule("at least 1, or -1", lambda value: value >= 1 or value == -1)
ODD = Rule("odd, or 0", lambda value: value == 0 or (value > 0 and value % 2 == 1))
EVERY_NTH = Rule(
    "op, or an integer of at least 1",
    lambda text: text == "op" or (text.isascii() and text.isdigit() and int(text) >= 1),
)
NOT_EMPTY = Rule("not empty", lambda text: bool(text.strip()))
ASCENDING = Rule("ascending", lambda values: values == sorted(values))
_RUN_FILES = {"config.json", "metrics.jsonl", "status.json", ".lock", "samples", "wandb", "flight_recorder"}
_RUN_FILES |= {"dataset_files.json.gz", "unreadable_images.txt"}
INNER_FOLDER = Rule(
    "a folder inside the run directory, without `..`, and no file of the run",
    lambda name: is_inner_folder(name) and PurePath(name).parts[0] not in _RUN_FILES,
)
PLAIN_NAME = Rule("a folder name without slashes, of at most 200 bytes", is_plain_name)

PUBLISHED = Needs("a published model", lambda config: config.model.name in FAMILIES)
OWN = Needs("a model that is not published", lambda config: config.model.name not in FAMILIES)
CAPTIONED = Needs(
    "dataset.dataset_name = captions",
    lambda config: config.dataset.dataset_name in ("captions", "dummy"),  # dummy can replace any dataset
)
REMOTE = Needs(
    "an address (s3://...) as dataset.root_dir",
    lambda config: "://" in (config.dataset.root_dir or "") or config.dataset.dataset_name == "dummy",
)
CAPTIONS = Needs("model.text, or a published model", lambda config: config.model.text or config.model.name in FAMILIES)
MUON = Needs("optimizer.name = Muon", lambda config: config.optimizer.name not in ("AdamW", "AdamW8bit"))
ON_GPU = Idle(unless="a GPU", test=lambda _: False, on="cpu")
PROFILED = Idle(
    unless="profiling.enable_profiling",
    test=lambda config: config.profiling.enable_profiling or config.profiling.enable_memory_snapshot,
)


@dataclass(frozen=True)
class Job:
    """The configuration to run, and the folder for its results."""

    config_file: str | None = None
    """Configuration of the job: a TOML file, the name of one in train_configs/, or module:function of a `Config`."""
    dump_folder: str = "./outputs"
    """Folder of the run directories. A run writes to <dump_folder>/<experiment_name>/."""
    description: str = ""
    """A sentence about the run, stored in its config.json."""
    print_config: bool = False
    """Print the resolved configuration and exit without training."""


@dataclass(frozen=True)
class Model:
    """The diffusion transformer. A flavor sets its sizes; for the native model a preset sets further options."""

    name: Annotated[str, MODELS] = "dit"
    """Architecture: the native diffusion transformer (dit), with a decoupled head (ddt, docs/recipes.md), or a
    published model of diffusers (docs/finetune.md). Options follow a name: `ddt head_depth=2 head_width=2048`."""
    flavor: str = "DiT-S"
    """Size: DiT-Mi to DiT-7B, FLUX.1-dev, SD3-medium, ... or a tiny debugmodel. DiT-S/4 also sets patch_size 4."""
    path: Annotated[str | None, PUBLISHED] = None
    """Published weights: a folder saved by diffusers, a hub name or a .safetensors file. Default: random weights."""
    overrides: list[str] = field(default_factory=list)
    """Sizes that replace the flavor's: depth=24 width=1536 num_heads=24. For published models, names of config.json."""
    preset: Annotated[Literal["torchditan", "official", "llama3_diffusion"], OWN] = "torchditan"
    """torchditan (RoPE, SwiGLU), official (Peebles and Xie 2023), or llama3_diffusion (TorchDiTan course project)."""
    block: Annotated[str, BLOCKS, OWN] = "dit"
    """The repeated block: attention, then a feed-forward layer (dit), or another one (docs/extending.md)."""
    patch_size: Annotated[int, AtLeast(1), OWN] = 2
    """Side of a square patch, in pixels or latent cells. Image height and width must be multiples of it."""
    input_channels: Annotated[int | None, AtLeast(1)] = None
    """Channels of a sample (3 for RGB pixels, 16 for Cosmos latents). Default: the dataset's."""
    sample_size: Annotated[list[Annotated[int, Between(1, 65_536)]] | None, Length(2, 3)] = None
    """[Frames,] height and width of the model's input, in pixels or latent cells; filled in from the data."""
    conditioning: Annotated[Literal["adaln", "adaln_single", "in_context"] | None, OWN] = None
    """Conditioning on timestep and label: adaLN-zero modulation by each block or shared by all (adaln_single), or extra
    tokens. Default: the preset's."""
    norm_type: Annotated[Literal["rmsnorm", "layernorm", "np_layernorm", "fused_rmsnorm"] | None, OWN] = None
    """Norm of the blocks; np_layernorm has no parameters, fused_rmsnorm means rmsnorm. Default: the preset's."""
    qk_norm: Annotated[bool | None, OWN] = None
    """Normalize the queries and keys of every head. Default: the preset's."""
    mlp: Annotated[Literal["swiglu", "gelu"] | None, OWN] = None
    """Feed-forward layer. Default: the preset's."""
    position: Annotated[Literal["rope", "sincos", "rope_sincos"] | None, OWN] = None
    """Axial 2D rotary embedding, a fixed sin-cos table added to the patches, or both. Default: the preset's."""
    timestep_scale: Annotated[float, Above(0), OWN] = 1000.0
    """Factor of the timestep in its embedding: 1000 as DiT, 1 as SiT and LightningDiT. Default for imf: 1."""
    timestep_frequencies: Annotated[Literal["dit", "diffusers", "ddt", "gaussian"], OWN] = "dit"
    """Frequencies of that embedding: the paper's (dit), the slightly different ones of diffusers' DiT, 1 to 1/10 (ddt),
    or random ones, as DiT-DH (gaussian)."""
    learn_sigma: Annotated[bool | None, OWN] = None
    """Predict a variance in addition to the mean (twice the output channels). Default: the preset's."""
    patch_bottleneck: Annotated[int | None, AtLeast(1), OWN] = None
    """Embed patches by two linear layers with this width between them, such as 128 for JiT. Default: one layer."""
    text: Annotated[Literal["in_context", "cross_attention", "joint"] | None, OWN] = None
    """Read captions: as tokens before the patches, in joint blocks with weights of their own, or by cross-attention in
    every block (docs/finetune.md)."""
    text_positions: bool = True
    """Add sin-cos positions to the tokens of a caption, so that the order of words counts. False switches off
    text_kernel as well."""
    text_kernel: Annotated[
        int | None,
        ODD,
        Needs("model.text", lambda config: config.model.text or config.model.text_kernel == 0),
        Idle(
            unless="model.text_positions",
            test=lambda config: config.model.text_positions or not config.model.text_kernel,
        ),
    ] = None
    """Number of words in a row, odd, that a convolution mixes, so that the order of words is learned soon; 0 for none.
    Default: 5 with text_blocks, else 0."""
    text_blocks: Annotated[
        int | None, AtLeast(0), Needs("model.text", lambda config: config.model.text or config.model.text_blocks == 0)
    ] = None
    """Number of blocks that only the tokens of a caption pass, before the others. Default: 2 for wordllama, else 0."""
    text_tokens: Annotated[int | None, AtLeast(1), Needs("model.text")] = None
    """Number of tokens in a caption's embeddings; filled in from the captions."""
    text_width: Annotated[int | None, AtLeast(1), Needs("model.text")] = None
    """Width of a caption's embeddings; filled in from the captions."""
    pooled_width: Annotated[int | None, AtLeast(1), Needs("model.text")] = None
    """Width of a caption's pooled embedding, which is added to the timestep's; filled in from the captions."""


@dataclass(frozen=True)
class Dataset:
    """The images to train on."""

    dataset_name: Annotated[str, DATASETS] = "digits"
    """Name of the dataset (docs/data.md), or your own (docs/extending.md)."""
    root_dir: str | None = None
    """Folder or file of the images, for datasets that do not come with a Python package. Tar shards may be a pattern
    (`a-{000..099}.tar`) or an address (`s3://...`)."""
    hub_name: str | None = None
    """Hugging Face dataset to read instead of root_dir, if the dataset supports it."""
    streaming: bool = False
    """Stream the hub dataset in its stored order instead of downloading it first (torchdata, unshuffled)."""
    image_size: Annotated[list[Annotated[int, AtLeast(1)]] | None, Length(1, 2)] = None
    """Height and width of a sample, `32` or `[32, 48]`. Default: the dataset's."""
    num_classes: Annotated[int | None, AtLeast(0)] = None
    """Number of class labels; 0 trains without labels. Default: the dataset's."""
    num_workers: Annotated[int, AtLeast(0)] = 2
    """Worker processes per rank that decode images (threads for latents); 0 decodes in the training process."""
    crop: Literal["center", "adm", "random"] = "center"
    """Part of a larger image: its center, the center resampled as in ADM, or a part chosen by the image's number."""
    horizontal_flip: bool | None = None
    """Mirror half of the training images, chosen by their position in the stream. Default: the dataset's."""
    image_key: str = "image"
    """Column of the images in parquet files and hub datasets."""
    label_key: str = "label"
    """Column of the labels in parquet files and hub datasets; key of the labels in `.json` members of tar shards."""
    fingerprint: str | None = None
    """Identity of latents, captions or a folder of images; filled in. A run refuses to resume with other data."""
    corrupt_images: Literal["error", "skip"] = "error"
    """How to handle unreadable images: stop and name them (error), or name them and use the next images (skip)."""
    dummy_fill: Annotated[Literal["normal", "zeros"], Idle(unless="dataset.dataset_name = dummy")] = "normal"
    """Values of the dummy dataset: standard normal, or zeros (which GPUs process faster than real data)."""
    dummy_size: Annotated[int, AtLeast(1), Idle(unless="dataset.dataset_name = dummy")] = 10000
    """Number of samples in the dummy dataset."""
    caption_key: Annotated[str, CAPTIONED] = "text"
    """Column of the captions in metadata.jsonl, parquet files and hub datasets; key in `.json` members."""
    caption_from: Annotated[Literal["files", "file_name"], CAPTIONED] = "files"
    """Where captions are: in files next to the images, or the image's own name: `a_red_cat.png`."""
    trigger_word: Annotated[str | None, NOT_EMPTY, CAPTIONED] = None
    """Replaces `[trigger]` in captions; captions without `[trigger]` start with it."""
    shuffle_tags: Annotated[int, AtLeast(0), CAPTIONED] = 0
    """Variants of each caption of comma-separated tags, shuffled after the first tag; 0 keeps captions as they are."""
    aspect_buckets: Annotated[bool, CAPTIONED] = False
    """Keep each image's approximate aspect ratio at about the area of image_size; one size per step."""
    bucket_step: Annotated[int, AtLeast(1), CAPTIONED] = 64
    """The sides of a bucket are multiples of this number of pixels."""
    upscale: Annotated[bool, CAPTIONED] = False
    """Enlarge images that are smaller than their sample instead of refusing them."""
    held_out: Annotated[int | None, AtLeast(0), CAPTIONED] = None
    """Number of images held out for validation. Default: 2 percent if there are 20 or more."""
    num_frames: Annotated[int | None, AtLeast(1), CAPTIONED] = None
    """Read the first num_frames frames of videos instead of images."""
    remote_cache_gib: Annotated[float | None, Above(0), REMOTE] = None
    """Most GiB of blocks of remote tar shards in cache.folder; above it, the oldest are deleted. Default: no limit."""


@dataclass(frozen=True)
class Autoencoder:
    """The autoencoder that encodes pixels to latents and decodes latents to pixels."""

    name: Annotated[str | None, AUTOENCODERS] = None
    """An autoencoder without weights (haar), a published one, or the kind of what is at path: cosmos, diffusers or rae
    (docs/data.md). Default: that of the latents."""
    path: str | None = None
    """Folder of the weights, or a hub name. Default: follows from the latents, autoencoder.name or model.path."""
    downsampling: Annotated[int | None, AtLeast(1)] = None
    """Pixels per latent cell along each side: 2, 4 or 8 for haar (default 4); fixed for the others."""
    online: bool = False
    """Encode pixels on the device at each step instead of reading encoded latents."""
    sample_posterior: bool = False
    """Sample latents from the encoder's mean and variance, keyed to their positions, instead of using the mean."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute precision of the autoencoder. Default: the precision that its weights need."""
    shift: list[float] | None = None
    """Normalization (z - shift) x scale, one number or one per channel. Default: published values or index.json."""
    scale: Annotated[list[Annotated[float, Above(0)]] | None, Length(1)] = None
    """See shift."""
    fingerprint: str | None = None
    """Identity of the weights, filled in from the latents. A decoder with another identity is refused."""

    @property
    def is_given(self) -> bool:
        """Whether the model's samples are latents, also before the name follows from the path."""
        return self.name is not None or self.path is not None


@dataclass(frozen=True)
class Diffusion:
    """The training objective and its timesteps."""

    objective: Annotated[str, OBJECTIVES] = "flow_matching"
    """flow_matching: x_t = (1 - t) noise + t x, velocity target. ddpm: 1000 noise levels (the DiT paper, sdxl). imf:
    one-step generation (docs/recipes.md)."""
    prediction: Literal["epsilon", "v", "x"] | None = None
    """What the model predicts. Default: v, the velocity, for flow_matching; epsilon, the noise, for ddpm."""
    loss_weighting: Literal["none", "min_snr"] = "none"
    """Weight of the training loss by noise level: none, or min_snr (Hang et al. 2023, gamma 5). Validation has no
    weights."""
    noise_schedule: Literal["linear", "cosine", "scaled_linear"] | None = None
    """Noise levels of ddpm. Default: linear (0.0001 to 0.02), as DiT; scaled_linear for sdxl."""
    timestep_sampling: Literal["uniform", "logit_normal"] = "logit_normal"
    """Distribution of the training timesteps (t = 0 is noise, t = 1 is data)."""
    logit_normal_mean: float = 0.0
    """Mean of logit(t); a value below 0 trains more on noisy samples. Default for imf: 0.4."""
    logit_normal_std: Annotated[float, Above(0)] = 1.0
    """Standard deviation of logit(t)."""
    timestep_shift: Annotated[float | None, Above(0)] = None
    """Shift towards noise, t / (t + shift (1 - t)); 1 disables it. Default: the model's, or 1."""
    label_dropout: Annotated[float, Between(0, 1)] = 0.1
    """Fraction of training samples whose label or caption is dropped, for classifier-free guidance."""
    embedded_guidance: Annotated[float, AtLeast(0)] = 1.0
    """Guidance scale during training, for models that embed it (FLUX.1-dev, FLUX.2-dev, HunyuanVideo)."""
    ingredients: list[Annotated[str, INGREDIENTS]] = field(default_factory=list)
    """Changes of the objective, each with its options after the name: "irepa encoder=PATH block=8" aligns a block with
    an image encoder (docs/recipes.md), "module:name weight=0.1" is one of your own (docs/extending.md)."""


@dataclass(frozen=True)
class Training:
    """Batch size, steps, precision and parallelism."""

    batch_size: Annotated[int | Literal["auto"] | None, AtLeast(1)] = None
    """Images per rank in one forward pass; auto searches. Default: global_batch_size divided by the ranks, or 16."""
    global_batch_size: Annotated[int | None, AtLeast(1)] = None
    """Images per optimizer step over all ranks. If it exceeds ranks x batch_size, gradients accumulate."""
    steps: Annotated[int, AtLeast(1)] = 1000
    """Number of optimizer steps."""
    seed: Annotated[int, SEED] = 0
    """Seed for weights, data order, noise, timesteps, label dropout and samples."""
    deterministic: bool = False
    """Use only deterministic kernels: slower, but bitwise reproducible."""
    compile: bool = False
    """Compile the transformer blocks, or the whole model, with torch.compile."""
    max_norm: Annotated[float, AtLeast(0)] = 1.0
    """Clip gradients to this global norm; 0 measures the norm without clipping."""
    mixed_precision_param: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Parameter precision in forward and backward; float16 uses loss scaling. Trained weights stay float32. "auto":
    bfloat16 on devices that multiply in it, else float32; a run keeps its precision."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Precision of the gradient reduction over ranks."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Products of float32 matrices in the run: IEEE float32, TF32 on CUDA (high), or also bfloat16 on CPUs with AMX."""
    attention_backend: Annotated[
        Literal["default", "cudnn", "flash", "efficient", "math"],
        Idle(unless="a GPU", test=lambda config: config.training.attention_backend == "math", on="cpu"),
    ] = "default"
    """Kernel of attention: on a GPU flash (default), or the one you prefer, where it can compute the call."""
    data_parallel_replicate_degree: Annotated[int, AtLeast(1)] = 1
    """Number of model replicas: the world size gives DDP, a number between 1 and the world size gives HSDP."""
    data_parallel_shard_degree: Annotated[int, DEGREE] = -1
    """Number of ranks that share the parameters (FSDP); -1 uses all remaining ranks."""
    context_parallel_degree: Annotated[int, AtLeast(1)] = 1
    """Number of ranks that share the tokens of each sample, for long sequences. They count as one in batch_size."""
    reshard_after_forward: Annotated[
        Literal["default", "always", "never"], OtherWords(true="always", false="never")
    ] = "default"
    """FSDP: free gathered weights after the forward pass, but keep the last block's (default), always (also true) or
    never (false)."""
    enable_cpu_offload: Annotated[bool, ON_GPU] = False
    """Keep parameters, gradients and optimizer state in host memory."""
    on_nonfinite: Annotated[Literal["stop", "rollback"], Needs("checkpoint.enable_checkpoint")] = "stop"
    """On a NaN: stop, or return to the last checkpoint and skip that data. rollback also acts on loss spikes."""

    def batch_size_on(self, num_ranks: int) -> int | Literal["auto"]:
        """`batch_size`, or its default: a rank's share of the global batch, or 16."""
        if self.batch_size is not None:
            return self.batch_size
        return 16 if self.global_batch_size is None else max(1, self.global_batch_size // num_ranks)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its hyperparameters."""

    name: Annotated[str, OPTIMIZERS] = "AdamW"
    """AdamW, torchao's AdamW with 8-bit moments, or Muon for the matrices of the blocks and AdamW for the rest, which
    takes options after its name: "Muon momentum=0.9 nesterov=false ns_steps=4 adjust_lr_fn=original"."""
    lr: Annotated[float, AtLeast(0)] = 1e-4
    """Peak learning rate."""
    beta1: Annotated[float, AtLeast(0), Below(1)] = 0.9
    """Decay rate of the first moment."""
    beta2: Annotated[float, AtLeast(0), Below(1)] = 0.999
    """Decay rate of the second moment."""
    eps: Annotated[float, Above(0)] = 1e-8
    """Added to the denominator of the update."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    """Decoupled weight decay, not of norms, biases and embeddings."""
    adamw_lr: Annotated[float | None, AtLeast(0), MUON] = None
    """Muon: peak learning rate of the AdamW part. Default: lr, which does not suit adjust_lr_fn=original."""
    ns_dtype: Annotated[Literal["bfloat16", "float32", "auto"], MUON] = "bfloat16"
    """Muon: dtype of the iterations. auto is bfloat16 where the device multiplies in it, else float32, which is faster
    there."""


@dataclass(frozen=True)
class LRScheduler:
    """The learning-rate schedule."""

    schedule: Annotated[str, SCHEDULES] = "constant"
    """Learning rate after warmup: constant, cosine or linear decay to the end, or warmup-stable-decay (wsd)."""
    warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Number of linear warmup steps."""
    decay_ratio: Annotated[float, Between(0, 1)] = 0.2
    """Fraction of all steps, at the end, in which wsd decays."""
    min_lr_factor: Annotated[float, Between(0, 1)] = 0.0
    """Learning rate at the end of a decay, as a fraction of the peak."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Recompute activations in the backward pass, to save memory."""

    mode: Literal["none", "full", "selective", "fraction"] = "none"
    """Blocks that recompute their activations: none, all (full), those of selective_ac_option, or a fraction."""
    selective_ac_option: Annotated[
        str, EVERY_NTH, OtherWords(), Idle(unless="activation_checkpoint.mode = selective")
    ] = "2"
    """For mode selective: n checkpoints every n-th block; op keeps the outputs of matmuls and attention."""
    fraction: Annotated[float, Between(0, 1), Idle(unless="activation_checkpoint.mode = fraction")] = 1.0
    """For mode fraction: the fraction of blocks, evenly spread, from 0 (none) to 1 (all)."""


@dataclass(frozen=True)
class Compile:
    """Options of torch.compile, for --training.compile."""

    backend: str = "inductor"
    """Backend of torch.compile."""
    scope: Literal["block", "model"] = "block"
    """Compile every block on its own, or the whole model as one graph: a longer start, only for one process and DDP."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of inductor. max-autotune-no-cudagraphs tries matmul templates: a slow start."""


@dataclass(frozen=True)
class Float8:
    """Float8 training of the linear layers, through torchao."""

    enable_float8_linear: bool = False
    """Train the blocks' large linear layers in float8 through torchao (compute capability 8.9 or newer): below a width
    of about 2,048 none gains. Use it with --training.compile."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Scaling granularity of torchao's float8 training."""
    emulate: bool = False
    """Emulate float8 products in higher precision, under CUDA's shape rules, on devices without them (slow). Layers of
    all sizes take part."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints and initial weights."""

    enable_checkpoint: bool = False
    """Write checkpoints during training. After an interruption, the same command continues from the newest one."""
    save_final: bool = True
    """Without enable_checkpoint, keep the weights of the last step (the averaged ones if the run has an average) in one
    file. Such a run cannot be continued, only started from. If you set enable_checkpoint to false, the default is
    false: nothing is kept."""
    folder: Annotated[str, INNER_FOLDER] = "checkpoint"
    """Folder of the checkpoints inside the run directory."""
    interval: Annotated[int, AtLeast(1), Idle(unless="checkpoint.enable_checkpoint")] = 500
    """Optimizer steps between checkpoints; the last step is always saved."""
    keep_latest_k: Annotated[int, AtLeast(0), Idle(unless="checkpoint.enable_checkpoint")] = 2
    """Number of checkpoints to keep; 0 keeps all."""
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"], Idle(unless="checkpoint.enable_checkpoint")
    ] = "disabled"
    """Write in the background: training waits only for a copy of the state. Pinned memory is for GPUs."""
    initial_load_path: str | None = None
    """Start a new run from these weights: a .safetensors file, a run directory, one of its checkpoints, or a shared
    model (a folder, hub:owner/name, or the name of a shipped one). A LoRA starts from a LoRA (docs/finetune.md)."""
    initial_load_convention: Annotated[Literal["torchditan"] | None, Needs("checkpoint.initial_load_path")] = None
    """Convention of weights from other programs; torchditan: t = 0 is noise, t = 1 data, velocity prediction."""


@dataclass(frozen=True)
class Metrics:
    """The run's name, its logs and the samples drawn during training."""

    experiment_name: Annotated[str | None, PLAIN_NAME] = None
    """Name of the run and of its folder. Default: the name of the config file."""
    log_freq: Annotated[int, AtLeast(1)] = 10
    """Steps between two log lines."""
    enable_color_printing: bool = True
    """Colour the console lines on a terminal."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    save_tb_folder: Annotated[str, INNER_FOLDER, Idle(unless="metrics.enable_tensorboard")] = "tensorboard"
    """Folder of the event files inside the run directory."""
    legacy_tags: Annotated[bool, Needs("metrics.enable_tensorboard")] = False
    """Also write the TensorBoard scalars under the course project's tags (wps, im/s, ...; docs/compatibility.md). The
    default is true with TensorBoard, if the job has model.preset llama3_diffusion or keys of the course project."""
    enable_wandb: bool = False
    """Log to Weights & Biases; offline if you are not logged in. WANDB_PROJECT names a project."""
    enable_trackio: bool = False
    """Log to Trackio on this machine, in the folder TRACKIO_DIR."""
    meters: list[Annotated[str, METERS]] = field(default_factory=list)
    """Further numbers of logged steps, such as update_norm (docs/extending.md)."""
    enable_sampling: bool = True
    """Draw sample grids during training."""
    sample_freq: Annotated[int, AtLeast(0), Idle(unless="metrics.enable_sampling")] = 0
    """Steps between two sample grids; 0 draws one at the end of the run."""
    sample_batch_size: Annotated[int, AtLeast(1)] = 16
    """Images that each rank samples at once."""


@dataclass(frozen=True)
class Sampling:
    """Sampling of images, during training and by torchditan generate."""

    sampler: Annotated[str, SAMPLERS] = "euler"
    """flow_matching: euler, of second order heun and dpmpp_2m, or ancestral, which adds noise in each step. ddpm: ddim,
    which euler means too, or ancestral."""
    num_steps: Annotated[int, AtLeast(1)] = 50
    """Solver steps from noise to image; heun evaluates the model twice per step. Default for imf: 1."""
    spacing: Literal["trailing", "leading", "linspace"] = "trailing"
    """Levels of ddpm, for 10 steps: trailing 99, 199, ..., 999; leading 0, 100, ..., 900; linspace 0, 111, ..., 999."""
    clip_sample: bool | None = None
    """Clip the sample that ddpm predicts in each step to [-1, 1]. Default: for runs that train on pixels."""
    timestep_shift: Annotated[float | None, Above(0)] = None
    """Shift towards noise in sampling, for flow_matching. Default: that of FLUX.2's pipeline for this number of steps,
    else diffusion.timestep_shift."""
    guidance_scale: Annotated[float, AtLeast(0)] = 2.0
    """Scale of classifier-free guidance; 1 disables it."""
    guidance_interval: Annotated[list[Annotated[float, Between(0, 1)]], Length(2, 2), ASCENDING] = field(
        default_factory=lambda: [0.0, 1.0]
    )
    """Guidance applies for t between these two values (t = 1 is data)."""
    guidance_channels: Annotated[int | None, AtLeast(1)] = None
    """Guide only the first n channels, as the official DiT does (3). Default: all."""
    images_per_class: Annotated[int, AtLeast(1)] = 8
    """Generated images in each row of the grid."""
    max_classes: Annotated[int, AtLeast(1)] = 10
    """Maximum number of rows in the grid; each row shows one class."""
    prompts: Annotated[list[str], CAPTIONS] = field(default_factory=list)
    """Prompts to sample, one grid row each; `@prompts.txt` stands for the lines of a file (docs/finetune.md).
    Default: four held-out captions, or else training captions."""
    negative_prompt: Annotated[
        str,
        CAPTIONS,
        Idle(unless="a sampling.guidance_scale other than 1", test=lambda config: config.sampling.guidance_scale != 1),
    ] = ""
    """Guidance moves samples away from this text. Default: the empty caption."""
    at_start: bool = False
    """Also draw a grid before the first step."""
    embedded_guidance: Annotated[float, AtLeast(0)] = 3.5
    """Guidance scale during sampling, for models that embed it (FLUX.1-dev, FLUX.2-dev, HunyuanVideo)."""


@dataclass(frozen=True)
class TextEncoder:
    """The text encoders, which encode captions once before training. The cache stores the embeddings."""

    name: Annotated[str, TEXT_ENCODERS] = "auto"
    """What encodes captions: auto (what is at path; wordllama without one), the encoders of a diffusers pipeline, one
    encoder of transformers, wordllama (static embeddings, no download), or your own (docs/extending.md)."""
    path: str | None = None
    """Folder or hub name of a diffusers pipeline, or of an encoder that transformers opens (FLAN-T5, T5Gemma, CLIP's
    text model, Qwen3). A published model's default: model.path."""
    max_length: Annotated[int | None, AtLeast(1)] = None
    """Tokens per caption. Default: as many as the pipeline's model takes; 128 for an encoder, or fewer if it reads
    fewer; 64 for wordllama."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute precision of the text encoders."""


@dataclass(frozen=True)
class Cache:
    """Cache of what is slow to find: latents and embeddings of captioned images, the members of tar shards."""

    folder: str | None = None
    """Folder of the cache; runs share it. Default: <dump_folder>/cache."""
    only: bool = False
    """Encode the missing samples, then exit; short form `--cache_only`."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters, to fine-tune a published model without training all its weights."""

    rank: Annotated[int, AtLeast(0)] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[float | None, Above(0), Needs("lora.rank")] = None
    """Adapter updates are scaled by alpha / rank. Default: the rank."""
    target_modules: Annotated[list[str], Needs("lora.rank")] = field(default_factory=list)
    """Layers that get an adapter, by the end of their names or by regular expression. Default: attention layers."""
    assistant_path: Annotated[str | None, Needs("lora.rank")] = None
    """A LoRA that is active in training and disabled in sampling, such as FLUX.1-schnell's training adapter: a file, or
    a folder or hub name with one file. owner/name/file.safetensors names a file on the hub."""


@dataclass(frozen=True)
class Quantize:
    """Storage precision of the frozen weights under a LoRA."""

    base: Annotated[Literal["float32", "bfloat16", "int8"], Needs("lora.rank")] = "float32"
    """Precision of the blocks' frozen linear layers; int8 (one scale per row) halves the memory of bfloat16."""


@dataclass(frozen=True)
class EMA:
    """Exponential moving average of the weights, for sampling and export."""

    enable: bool = True
    """Keep an exponential moving average of the weights, for sampling and export."""
    decay: Annotated[float, AtLeast(0), Below(1), Idle(unless="ema.width = none"), Idle(unless="ema.enable")] = 0.9999
    """Decay per step after warmup; 0.9999 suits a global batch of 256."""
    warmup: Annotated[bool, Idle(unless="ema.width = none"), Idle(unless="ema.enable")] = True
    """Average over fewer steps at the start: decay min(decay, (1 + step) / (10 + step))."""
    width: Annotated[float | None, Above(0), Below(0.2887), Idle(unless="ema.enable")] = None
    """In place of decay and warmup: the average's width relative to the steps so far, such as 0.05 (sigma_rel).
    A uniform average has 0.2887."""


@dataclass(frozen=True)
class Validation:
    """The loss on held-out images, comparable between runs."""

    freq: Annotated[int, AtLeast(0)] = 0
    """Steps between two validation losses, computed with fixed noise and timesteps; 0 disables validation."""
    num_images: Annotated[int, AtLeast(1)] = 256
    """Number of held-out images per validation."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of guided samples against real images, during training (docs/evaluation.md)."""

    freq: Annotated[int, AtLeast(0)] = 0
    """Steps between two evaluations, and one at the last step; 0 disables them."""
    metrics: Annotated[list[Annotated[str, METRICS]], Length(1)] = field(default_factory=lambda: ["effnet"])
    """What to compute: effnet, inception, classifier or "dinov2 path=PLACE"; for a model of captions "clip path=PLACE",
    and prompts if they are of the dataset scenes."""
    num_samples: Annotated[int, AtLeast(1)] = 2600
    """Samples per evaluation. FD-EffNetLite0 needs more than 1,280, and FID more than 2,048."""
    seed: Annotated[int, AtLeast(0)] = 1
    """Seed of the noise."""


@dataclass(frozen=True)
class Profiling:
    """Profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Write traces of torch.profiler."""
    save_traces_folder: Annotated[str, INNER_FOLDER] = "profile_trace"
    """Folder of the traces inside the run directory."""
    profile_freq: Annotated[int, AtLeast(1), PROFILED] = 100
    """Steps between two traced steps."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots, every profile_freq steps and on running out of memory."""
    save_memory_snapshot_folder: Annotated[str, INNER_FOLDER] = "memory_snapshot"
    """Folder of the snapshots inside the run directory."""


@dataclass(frozen=True)
class Comm:
    """Timeouts of the communication between ranks."""

    init_timeout_seconds: Annotated[int, AtLeast(1)] = 600
    """Timeout of collectives in saving, and until the first step is done (compilation is slow)."""
    train_timeout_seconds: Annotated[int, AtLeast(1)] = 100
    """Timeout of collectives after the first step."""


@dataclass(frozen=True)
class Autotune:
    """The search of --training.batch_size=auto: trial runs of six steps, each in new processes.

    The chosen batch leaves 5 percent of the device's memory free."""

    goal: Literal["largest", "fastest"] = "largest"
    """The largest batch that fits, or the tried batch that gives the most images per second."""
    batch_size_multiple: Annotated[int, Between(1, 4096)] = 1
    """The search tries multiples of this batch size, up to 4096; 16 suits float8."""
    memory_limit_gib: Annotated[float | None, Above(0)] = None
    """Memory limit per rank on a CPU. Without it, the search may use all memory of the machine."""


@dataclass(frozen=True)
class Config:
    """All sections, in the order of `--help`."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    dataset: Dataset = field(default_factory=Dataset)
    autoencoder: Autoencoder = field(default_factory=Autoencoder)
    diffusion: Diffusion = field(default_factory=Diffusion)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    lora: Annotated[LoRA, PUBLISHED] = field(default_factory=LoRA)
    quantize: Annotated[Quantize, PUBLISHED] = field(default_factory=Quantize)
    text_encoder: TextEncoder = field(default_factory=TextEncoder)
    cache: Cache = field(default_factory=Cache)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Annotated[Compile, Idle(unless="training.compile")] = field(default_factory=Compile)
    float8: Annotated[Float8, Idle(unless="float8.enable_float8_linear")] = field(default_factory=Float8)
    ema: EMA = field(default_factory=EMA)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    sampling: Sampling = field(default_factory=Sampling)
    validation: Validation = field(default_factory=Validation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    autotune: Autotune = field(default_factory=Autotune)

    def replace(self, values: Mapping[str, Any]) -> "Config":
        """Return a copy with other values: `config.replace({"training.batch_size": 8})`. Values are not checked.

        Raises:
            AttributeError, TypeError: a name is not an option.
        """
        sections: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        changed = {name: dataclasses.replace(getattr(self, name), **keys) for name, keys in sections.items()}
        return dataclasses.replace(self, **changed)

    def fill_in(self, values: Mapping[str, Any]) -> "Config":
        """Return a copy in which these values replace None: `config.fill_in({"model.text_width": 64})`."""
        return self.replace({name: value for name, value in values.items() if attrgetter(name)(self) is None})


def dataset_channels(config: Config) -> int | None:
    """Channels to request from the dataset: those of the model, unless each step encodes the samples."""
    if config.autoencoder.online:
        return 3 if config.dataset.dataset_name == "dummy" else None
    return config.model.input_channels


def cache_folder(config: Config) -> Path:
    """`cache.folder`, or its default."""
    return Path(config.cache.folder or Path(config.job.dump_folder) / "cache").expanduser()


def flatten(config: Config) -> dict[str, Any]:
    """Return `{"training.steps": 1000, ...}`, in the order of `--help`."""
    return {
        f"{section}.{key}": value for section, keys in dataclasses.asdict(config).items() for key, value in keys.items()
    }
