# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The implementations behind option values. One line adds an objective, a block, a metric ... (docs/extending.md).

A line has the form `"value": "module:name"`. The module is imported only for a job with that value, so this file does
not import torch. config/options.py takes the choices of its options from it.
"""

from __future__ import annotations

import pkgutil
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

OBJECTIVES = {
    "flow_matching": "torchditan.diffusion.flow_matching:FlowMatching",
    "ddpm": "torchditan.diffusion.ddpm:DDPM",
}
"""`diffusion.objective`: classes that follow `torchditan.diffusion.objectives.Objective`."""

SELF_ALIGNMENT = "torchditan.diffusion.alignment:SelfAlignment"
"""The wrapper of the objective for `diffusion.self_alignment`."""

CONTEXT_PARALLEL = "torchditan.distributed.context_parallel"
"""The module for `training.context_parallel_degree` above 1."""

OPEN_DATASET = "data:build_dataset"
OPEN_CAPTIONS = "torchditan.finetune.captions.dataset:open_captions"
OPEN_LATENTS = "torchditan.latents.latent_space:build_sample_space"
"""The functions that open the data of a job (job/prepare.py)."""

TUNE_BATCH_SIZE = "torchditan.ablation.autotune:resolve_batch_size"
"""The search for `training.batch_size = "auto"`."""

LOAD_INITIAL_WEIGHTS = "torchditan.weights.initial:load_initial_weights"
"""The function for `checkpoint.initial_load_path`."""

EVALUATION = "torchditan.evaluation.during_training:TrainingEvaluation"
"""What measures samples during training, for `evaluation.freq`."""

EXPORT_WEIGHTS = "torchditan.weights.exported:export_model"
LOAD_WEIGHTS = "torchditan.weights.initial:load_weights_file"
"""The functions that write and read the final weights of a run without checkpoints (`checkpoint.save_final`)."""

BLOCKS = {
    "dit": "torchditan.models.dit:DiTBlock",
    "value_residual": "torchditan.ingredients.value_residual:ValueResidualBlock",
}
"""`model.block`: subclasses of `torchditan.models.dit.Block`."""

OPTIMIZERS = {
    "AdamW": "torchditan.optim.optimizers:adamw",
    "AdamW8bit": "torchditan.optim.adamw_8bit:adamw_8bit",
    "Muon": "torchditan.optim.muon:muon",
}
"""`optimizer.name`: functions from the `[optimizer]` options to a list of `ParameterGroup` (optim/optimizers.py)."""

ARCHITECTURES = {
    "dit": "torchditan.models:build_dit_spec",
}
"""`model.name`: functions from the `[model]` options to the `ModelSpec` of an architecture in models/."""

FAMILIES = {
    "flux": "torchditan.finetune.published.flux:Flux",
    "sd3": "torchditan.finetune.published.sd3:SD3",
    "sdxl": "torchditan.finetune.published.sdxl:SDXL",
    "mochi": "torchditan.finetune.published.mochi:Mochi",
    "hunyuan_video": "torchditan.finetune.published.hunyuan_video:HunyuanVideo",
    "wan": "torchditan.finetune.published.wan:Wan",
    "qwen_image": "torchditan.finetune.published.qwen_image:QwenImage",
}
"""`model.name`: families of published models, subclasses of `PublishedModel` (docs/adding_a_model.md)."""

MODELS = ChainMap(FAMILIES, ARCHITECTURES)
"""All values of `model.name`, those of models/ first."""

METRICS = {
    "classifier": "torchditan.evaluation.classifier:ClassifierAccuracy",
    "effnet": "torchditan.evaluation.quality:EffNetQuality",
    "inception": "torchditan.evaluation.quality:InceptionQuality",
}
"""`--metrics` of scripts/evaluate.py: classes that follow `evaluation.metric.Metric`. Subclasses of
`evaluation.quality.Quality` give the Fréchet distance and its other figures over an extractor of yours."""

AUTOENCODERS = {
    "haar": "torchditan.autoencoders.haar:open_haar",
    "patch": "torchditan.autoencoders.patch:open_patch",
    "cosmos": "torchditan.autoencoders.cosmos:open_cosmos",
    "diffusers": "torchditan.autoencoders.published:open_published",
}
"""`autoencoder.name`: functions from `[autoencoder]` to an `Autoencoder`; autoencoders/catalogue.py has more names."""

FORMATS = {
    "dit": "torchditan.weights.formats.dit:convert_dit",
    "sit": "torchditan.weights.formats.dit:convert_sit",
    "repa": "torchditan.weights.formats.dit:convert_repa",
    "lightningdit": "torchditan.weights.formats.lightningdit:convert",
    "diffusers": "torchditan.weights.formats.diffusers_dit:convert",
}
"""`--format` of an import: functions that follow `torchditan.weights.formats.Convert` (docs/checkpoints.md)."""


def registered(registry: Mapping[str, str], name: str) -> Any:
    """Import the class or function that a registry has under this name."""
    return pkgutil.resolve_name(registry[name])
