# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Context parallelism: predictions, features and gradients are those of one process, and each rank keeps its part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from refusals import refused

from torchditan.config.loader import load_config
from torchditan.config.options import Compile
from torchditan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchditan.distributed.compilation import compile_model
from torchditan.distributed.context_parallel import OPTION, split_tokens, split_tokens_over_ranks
from torchditan.extras.methods.ddt import DDT, DDTConfig
from torchditan.extras.planner.trace import DeviceKernels
from torchditan.models.dit import Block, DiT, DiTConfig

SIZES: dict[str, Any] = {"depth": 2, "width": 32, "num_heads": 4, "patch_size": 2, "input_channels": 3}
TEXT = {"text_tokens": 5, "text_width": 8, "num_classes": 0}
OFFICIAL = {"norm_type": "np_layernorm", "qk_norm": False, "mlp": "gelu", "position": "sincos", "learn_sigma": True}
CASES: dict[str, dict[str, Any]] = {  # 16 patches, unless the image has another size
    "adaLN": {},
    "official": OFFICIAL,
    "adaLN-single": {"conditioning": "adaln_single", "position": "rope_sincos"},
    "in context, 18 tokens": {"conditioning": "in_context"},
    "text in context, 21 tokens": {**TEXT, "text": "in_context", "pooled_width": 6},
    "text in context with its condition, 22 tokens": {**TEXT, "text": "in_context", "conditioning": "in_context"},
    "cross-attention": {**TEXT, "text": "cross_attention"},
    "text with blocks of its own, 21 tokens": {**TEXT, "text": "in_context", "text_blocks": 1, "text_kernel": 3},
    "DDT": {"head_depth": 2, "head_width": 32, "head_heads": 4},
    "DiT-DH, 5 tokens": {"head_depth": 1, "head_width": 48, "head_heads": 4, "silu_twice": True, "image_size": (2, 10)},
    "5 tokens, none on the last of 4 ranks": {"image_size": (2, 10)},
}


def random_model(options: dict[str, Any]) -> DiT:
    """Weights that are all different from 0, so that every part of the model has a gradient.

    In float64 a wrong gradient does not look like rounding; the runs of tests/trainer are in float32.
    """
    model_type, config_type = (DDT, DDTConfig) if "head_depth" in options else (DiT, DiTConfig)
    model = model_type(config_type(**{**SIZES, "image_size": (8, 8), "num_classes": 10, **options})).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs_of(config: DiTConfig, *, seed: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Three samples; the captions have padding."""
    generator = torch.Generator().manual_seed(seed)
    cond: dict[str, torch.Tensor] = {"class_label": torch.tensor([0, 3, 10])}
    if config.text is not None:
        cond = {"prompt_embeds": torch.randn(3, config.text_tokens, config.text_width, generator=generator)}
        cond["prompt_embeds_mask"] = torch.arange(config.text_tokens) < torch.tensor([[1], [3], [config.text_tokens]])
        cond["pooled_prompt_embeds"] = torch.randn(3, config.pooled_width, generator=generator)
    x_t = torch.randn(3, config.input_channels, *config.image_size, generator=generator)
    return x_t, torch.rand(3, generator=generator), cond


def outputs_and_gradients(model: DiT) -> dict[str, torch.Tensor]:
    """Prediction, features, and the gradients of a loss of both."""
    prediction, found = model(*inputs_of(model.config, seed=2), features=["blocks.0", "blocks.1"])
    weights = torch.linspace(-1, 1, prediction.numel()).view_as(prediction)
    loss = (prediction * weights).square().mean() + sum(tokens.square().mean() for tokens in found.values())
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    return {"prediction": prediction.detach(), **{name: found[name].detach() for name in found}, **gradients}


def compare_with_one_process(rank: int, world_size: int, folder: str) -> None:
    """On each rank: the means of the ranks' gradients, and the outputs, against the same model without a split."""
    store = dist.FileStore(f"{folder}/store-{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for name, options in CASES.items():
        for checkpointing in ("none", "full", "selective") if name == "text in context, 21 tokens" else ("none",):
            expected = outputs_and_gradients(random_model(options))
            model = random_model(options)
            split_tokens_over_ranks(model, degree=world_size, timeout_seconds=60)
            apply_activation_checkpoint(model.all_blocks, mode=checkpointing, selective_option="op")
            found = outputs_and_gradients(model)
            assert found.keys() == expected.keys()
            for key, value in found.items():
                mean = value.clone(memory_format=torch.contiguous_format) / world_size
                dist.all_reduce(mean)  # FSDP averages gradients; the outputs are equal on all ranks
                error = (mean - expected[key]).abs().max() / expected[key].abs().max()
                assert error < 1e-9, (name, checkpointing, key, error)
            own = inputs_of(model.config, seed=3 + rank)  # without gradients each rank has samples of its own
            with torch.no_grad():
                torch.testing.assert_close(model(*own), random_model(options)(*own), rtol=0, atol=0)
    dist.destroy_process_group()


@pytest.mark.usefixtures("fork_server")
def test_outputs_and_gradients_on_four_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    mp.start_processes(compare_with_one_process, args=(4, str(tmp_path)), nprocs=4, start_method="forkserver")


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_heads_of_a_decoupled_head_that_cannot_be_split_are_refused() -> None:
    with refused(f"{OPTION} = 2", "3"):
        split_tokens(
            random_model({"head_depth": 1, "head_width": 48, "head_heads": 3}), degree=2, rank=0, group_name=""
        )


@pytest.mark.usefixtures("group_of_one")
def test_a_block_with_its_exchanges_compiles_into_one_graph() -> None:
    expected = outputs_and_gradients(random_model({}))
    model = random_model({})
    split_tokens_over_ranks(model, degree=1, timeout_seconds=60)
    compile_model(model, blocks=model.blocks, options=Compile(backend="aot_eager"))  # fullgraph
    found = outputs_and_gradients(model)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-9)


def saved_bytes(config: DiTConfig, *, degree: int) -> int:
    """Bytes that autograd keeps of one sample from forward to backward, each storage once, without the weights."""
    with torch.device("meta"):
        model = DiT(config)
        x_t, t, cond = torch.empty(1, 4, *config.image_size), torch.empty(1), {"class_label": torch.zeros(1).long()}
    if degree > 1:
        split_tokens(model, degree=degree, rank=0, group_name=None)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage
        return tensor

    with DeviceKernels("default", is_own=True), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x_t, t, cond).square().mean()
    del loss
    return sum(storage.nbytes() for storage in saved.values())


def test_four_ranks_keep_about_a_quarter_of_the_activations() -> None:
    sizes = {**SIZES, "depth": 4, "width": 64, "input_channels": 4, "image_size": (256, 256), "num_classes": 10}
    config = DiTConfig(**sizes)
    assert config.num_patches == 16_384
    share = saved_bytes(config, degree=4) / saved_bytes(config, degree=1)
    print(f"share of one process: {share:.4f}")  # shown by pytest -s
    assert 0.24 < share < 0.3


class OwnBlock(Block):
    """A block of a plug-in, which may do anything with the tokens."""


SPLIT = "--training.context_parallel_degree=2"
DEGREE = "training.context_parallel_degree = "


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        ([SPLIT, "--training.batch_size=auto"], 'training.batch_size = "auto"', [DEGREE[:-3], "2"]),
        ([SPLIT, "--dataset.streaming", "--validation.freq=0"], "dataset.streaming = true", [DEGREE[:-3], "2"]),
        ([SPLIT, "--float8.enable_float8_linear"], "float8.enable_float8_linear = true", [DEGREE[:-3], "2"]),
        (["--training.context_parallel_degree=4", "--model.flavor=DiT-S"], f"{DEGREE}4", ["6", "3"]),
        ([SPLIT, "--model.name=sd3", "--model.flavor=debugmodel"], f"{DEGREE}2", ["sd3", "1"]),
        ([SPLIT, "--model.flavor=DiT-S", "--model.text=joint"], f"{DEGREE}2", ["joint", "mixes_only_in_attention"]),
        ([SPLIT, f"--model.block={__name__}:OwnBlock"], f"{DEGREE}2", ["OwnBlock", "mixes_only_in_attention"]),
    ],
)
def test_what_cannot_be_split_is_refused(flags: list[str], about: str, mentions: list[str]) -> None:
    load_config(["--training.context_parallel_degree=3", "--model.flavor=DiT-S"])
    with refused(about, *mentions):
        load_config(flags)
