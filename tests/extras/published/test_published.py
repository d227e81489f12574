# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published families: sizes, FLOPs, initial weights on every mesh, and refused options."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from debugmodels import MODELS, built, inputs_of, pristine, spec_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from torchditan.config.options import Model
from torchditan.errors import ConfigError
from torchditan.extras.published.families import family
from torchditan.models import build_model_spec
from torchditan.models.flops import count_model_flops
from torchditan.models.spec import ModelSpec

pytest.importorskip("diffusers")

# Billions of parameters, TFLOP of one sample's training step, and the latent it is for; counted elsewhere.
PUBLISHED = {
    ("flux", "FLUX.1-dev"): (11.901, 64.5, (16, 64, 64)),
    ("flux", "FLUX.1-schnell"): (11.891, 53.1, (16, 64, 64)),
    ("sd3", "SD3-medium"): (2.028, 26.7, (16, 128, 128)),
    ("sdxl", "SDXL"): (2.567, 20.2, (4, 128, 128)),
    ("hunyuan_video", "HunyuanVideo"): (12.82, 350.0, (16, 3, 68, 120)),  # 9 frames of video are 3 latent ones
    ("wan", "Wan2.1-T2V-1.3B"): (1.419, 849.0, (16, 21, 60, 104)),
    ("z_image", "Z-Image-Turbo"): (6.155, 175.6, (16, 128, 128)),
    ("wan", "Wan2.2-TI2V-5B"): (5.000, 1_551.0, (48, 31, 44, 80)),
    ("wan", "Wan2.1-I2V-14B"): (16.40, 10_056.0, (16, 33, 64, 96)),
    ("mochi", "Mochi-1"): (10.03, None, (12, 28, 60, 106)),
    ("flux2", "FLUX.2-klein-4B"): (3.876, 104.4, (128, 64, 64)),
    ("flux2", "FLUX.2-klein-9B"): (9.079, 226.5, (128, 64, 64)),
    ("flux2", "FLUX.2-dev"): (32.223, 847.7, (128, 64, 64)),
}


def published_spec(name: str, flavor: str, sample_shape: tuple[int, ...]) -> ModelSpec:
    return build_model_spec(Model(name=name, flavor=flavor), sample_shape=sample_shape, num_classes=0)


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_parameters_of_the_published_sizes(name, flavor):
    billions, _, sample_shape = PUBLISHED[name, flavor]
    model = published_spec(name, flavor, sample_shape).build()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=5e-4)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        pytest.param(*key, marks=pytest.mark.slow if key[0] == "sd3" else pytest.mark.nightly)
        for key in PUBLISHED
        if PUBLISHED[key][1]
    ],
)
def test_flops_of_the_published_sizes(name, flavor):
    _, teraflops, sample_shape = PUBLISHED[name, flavor]
    assert count_model_flops(published_spec(name, flavor, sample_shape)).total / 1e12 == pytest.approx(
        teraflops, rel=3e-3
    )


def mochi_forward_flops(config: dict, sample_shape: tuple[int, ...], text_length: int) -> int:
    """Matrix products of one sample, written down from the paper's figure of the model."""
    heads, head_dim, blocks = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, narrow, text_width = heads * head_dim, config["pooled_projection_dim"], config["text_embed_dim"]
    channels, frames, height, times = sample_shape
    video, text = frames * height * times // 4, text_length

    def gated(size: int) -> int:
        return 3 * size * (8 * size // 3)

    attention = 2 * (video + text) ** 2 * width
    video_block = video * (4 * width**2 + gated(width)) + 4 * width**2
    text_in = text * 3 * narrow * width
    text_out = text * (width * narrow + gated(narrow)) + 4 * width * narrow
    last_text = width * narrow  # its text is not updated
    pool = (text + 1) * 2 * text_width**2 + text_width**2 + text_width * width + 2 * (text + 1) * text_width
    time = config["time_embed_dim"] * width + width**2
    ends = 2 * video * 4 * channels * width + 2 * width**2
    angles = 3 * video * width // 2
    per_block = attention + video_block + text_in
    macs = blocks * per_block + (blocks - 1) * text_out + last_text
    return 2 * (macs + pool + time + ends + angles + text * text_width * narrow)


def test_mochi_counts_what_a_closed_form_says():
    sample_shape = (12, 2, 8, 12)
    spec = published_spec("mochi", "debugmodel", sample_shape)
    text_length = spec.conditioning.tensors["prompt_embeds"].shape[0]
    flops = count_model_flops(spec)
    assert flops.forward == mochi_forward_flops(spec.config, sample_shape, text_length)
    # Of the inputs' own layers there is no input gradient.
    assert flops.total / (3 * flops.forward) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("name", "flavor"), MODELS)
def test_example_inputs_fit_and_flops_are_counted(name, flavor):
    spec = spec_of(name, flavor)
    with torch.device("meta"):
        model = spec.build().to("meta")
        prediction = model(*spec.example_inputs(batch_size=2))
    assert prediction.shape == (2, *spec.sample_shape)
    flops = count_model_flops(spec)
    assert 2.8 * flops.forward < flops.total < 3 * flops.forward


@pytest.mark.parametrize(("name", "flavor"), MODELS)
def test_a_dropped_caption_leaves_a_finite_prediction_and_what_is_not_of_it(name, flavor):
    spec = spec_of(name, flavor)
    model = built(spec)
    x_t, t, cond = inputs_of(spec)
    without = spec.conditioning.drop(cond, torch.tensor([True, False]))
    kept = family(name).kept | {"guidance"}
    for key, value in cond.items():
        assert torch.equal(without[key][1], value[1])
        assert torch.equal(without[key][0], value[0]) == (key in kept)
    with torch.no_grad():
        prediction, dropped = model(x_t, t, cond), model(x_t, t, without)
    assert dropped.isfinite().all()
    assert not torch.allclose(dropped[0], prediction[0])
    assert torch.allclose(dropped[1], prediction[1], atol=1e-5)


@pytest.mark.parametrize("name", ["mochi", "hunyuan_video", "qwen_image", "z_image"])
def test_hidden_tokens_of_a_caption_say_nothing(name):
    spec = spec_of(name)
    (mask,) = (key for key, (_, dtype) in spec.conditioning.tensors.items() if dtype == torch.bool)
    model = built(spec)
    x_t, t, cond = inputs_of(spec)
    hidden = ~cond[mask]
    assert hidden[1].any()
    changed = cond | {"prompt_embeds": cond["prompt_embeds"].masked_fill(hidden[..., None], 9.0)}
    with torch.no_grad():
        assert torch.allclose(model(x_t, t, changed), model(x_t, t, cond), atol=1e-5)


def hash_weights(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def test_initial_weights_depend_on_seed_and_name_alone():
    spec = spec_of("sd3")
    first = hash_weights(built(spec))
    torch.manual_seed(7)
    torch.rand(3)
    assert hash_weights(built(spec)) == first
    assert hash_weights(built(spec, seed=1)) != first


@pytest.mark.parametrize(("name", "flavor"), MODELS)
def test_nothing_is_left_unset_and_buffers_are_those_of_diffusers(name, flavor):
    spec = spec_of(name, flavor)
    model = spec.build().to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(math.nan)
    model.init_weights(0)
    assert not any(tensor.isnan().any() for tensor in (*model.parameters(), *model.buffers()))
    published = dict(pristine(model, spec).named_buffers())
    buffers = dict(model.transformer.named_buffers())
    assert buffers.keys() == published.keys()
    assert all(torch.equal(buffers[key], published[key]) for key in published)


def shards_and_numbers(name: str, flavor: str, mesh: DeviceMesh) -> tuple[bool, list[float]]:
    """Whether this rank's shards are parts of the plain weights; prediction and gradient norm of the sharded model."""
    spec = spec_of(name, flavor)
    plain, model = built(spec, seed=3), spec.build()
    for module in (*spec.blocks(model), model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights(seed=3)
    full = dict(plain.named_parameters())
    are_equal = all(
        torch.equal(shard.to_local(), distribute_tensor(full[key], mesh, [Shard(0)], src_data_rank=None).to_local())
        for key, shard in model.named_parameters()
    )
    prediction = model(*inputs_of(spec))
    prediction.square().mean().backward()
    squares = sum(p.grad.to_local().square().sum() for p in model.parameters() if p.grad is not None)
    dist.all_reduce(squares)
    return are_equal, [prediction.abs().mean().item(), squares.item() ** 0.5]


def predict_on_ranks(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    found = {f"{name} {flavor}": shards_and_numbers(name, flavor, mesh) for name, flavor in MODELS}
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_weights_predictions_and_gradients_are_those_of_one_process_on_two_ranks(tmp_path):
    mp.start_processes(predict_on_ranks, args=(2, str(tmp_path)), nprocs=2, start_method="forkserver")
    ranks = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("rank-*.json"))]
    assert len(ranks) == 2 and len(ranks[0]) == len(MODELS)
    assert ranks[0] == ranks[1]
    for name, flavor in MODELS:
        are_equal, numbers = ranks[0][f"{name} {flavor}"]
        assert are_equal, name
        spec = spec_of(name, flavor)
        model = built(spec, seed=3)
        prediction = model(*inputs_of(spec))
        prediction.square().mean().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert numbers == pytest.approx([prediction.abs().mean().item(), norm.item()], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "sample_shape", "line"),
    [
        ({"name": "wan"}, (16, 8, 12), "takes videos"),
        ({"name": "sd3"}, (16, 2, 8, 12), "takes images"),
        ({"name": "mochi"}, (16, 2, 8, 12), "takes latents of 12 channels"),
        ({"name": "wan", "flavor": "debugmodel-i2v"}, (36, 2, 8, 12), "takes latents of 16 channels"),
        ({"name": "sdxl"}, (4, 8, 14), "must be multiples of [4, 4]"),
    ],
)
def test_samples_that_do_not_fit_are_refused_in_a_line(options, sample_shape, line):
    with pytest.raises(ConfigError, match=r"^(model|dataset)\.") as error:
        build_model_spec(Model(**{"flavor": "debugmodel"} | options), sample_shape=sample_shape, num_classes=0)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_an_image_model_of_wan_takes_captions_of_one_length():
    with pytest.raises(ConfigError, match=r"^text_encoder\.max_length = 77: .*512"):
        build_model_spec(
            Model(name="wan", flavor="debugmodel-i2v"), sample_shape=(16, 2, 8, 12), num_classes=0, text_length=77
        )
