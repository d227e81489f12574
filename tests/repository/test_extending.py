# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/extending.md: the examples on the page train, sample, resume and can be planned."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import extending_page
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from extending_page import examples
from PIL import Image
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchditan import registry
from torchditan.checkpoint.loading import read_state
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.checkpoint.run_state import ModelState, OptimizerState, RunState
from torchditan.config.errors import ConfigError
from torchditan.config.loader import load_config
from torchditan.config.options import Config, Diffusion, Optimizer, Sampling
from torchditan.diffusion.objectives import Objective, build_objective
from torchditan.models import build_model_spec
from torchditan.models.dit import FLAVORS, Block
from torchditan.models.flops import count_model_flops
from torchditan.optim.divergence import DivergenceGuard
from torchditan.optim.optimizers import (
    OptimizerParts,
    ParameterGroup,
    build_optimizer,
    clip_grad_norm,
    optimizer_parts,
    parameter_groups,
)
from torchditan.planner.memory import Parameters, Weight, model_state
from torchditan.planner.plan import plan_run
from torchditan.randomness import draw
from torchditan.run.reading import read_metrics
from torchditan.run.training_progress import Progress

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunDistributed, RunScript

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = """
    --model.flavor=debugmodel --training.mixed_precision_param=float32 --training.global_batch_size=16
    --lr_scheduler.schedule=constant --lr_scheduler.warmup_steps=0 --metrics.log_freq=1 --metrics.sample_freq=0
    --validation.freq=2 --validation.num_images=16 --sampling.num_steps=4 --sampling.max_classes=2
    --sampling.images_per_class=2
"""

INSIDE = "ingredient"
NUMBERS = "objective with numbers and a second time"
EXAMPLES = (
    "objective",
    NUMBERS,
    INSIDE,
    "sampler",
    "sampler of an SDE",
    "schedule",
    "meter",
    "optimizer",
    "block",
    "dataset",
)
"""Titles of sections; test_extending_evaluation.py has the others."""
CHOICES = [
    ("objective", "diffusion.objective", "x_prediction", "flow_matching"),
    (NUMBERS, "diffusion.objective", "noisy_data", "flow_matching"),
    ("optimizer", "optimizer.name", "PlainMuon", "AdamW"),
]
"""(section, option, value, default)."""


LOGGED = {INSIDE: ("similarity",), "meter": ("update_cosine",)}
FROM_OUTSIDE = {
    "objective": ("diffusion.objective", "x_prediction"),
    NUMBERS: ("diffusion.objective", "noisy_data"),
    INSIDE: ("diffusion.ingredients", "layer_sync"),
    "sampler": ("sampling.sampler", "midpoint"),
    "sampler of an SDE": ("sampling.sampler", "stochastic strength=0.5"),
    "schedule": ("lr_scheduler.schedule", "inverse_sqrt timescale=200"),
    "meter": ("metrics.meters", "update_angle"),
    "optimizer": ("optimizer.name", "PlainMuon"),
    "block": ("model.block", "parallel"),
}
"""(option, its value inside the package)."""


def add_to_the_repository(folder: Path) -> None:
    extending_page.add(EXAMPLES, folder)


@pytest.fixture
def added(tmp_path: Path) -> Iterator[None]:
    with extending_page.added(EXAMPLES, tmp_path / "added"):
        yield


def write_flowers(folder: Path, *, seed: int = 0) -> None:
    """Pictures with labels as the page's dataset reads them: dark ones and bright ones."""
    folder.mkdir(exist_ok=True)
    draws = np.random.default_rng(seed)
    for split, count in (("train", 64), ("validation", 16)):
        labels = np.arange(count) % 2
        images = draws.integers(0, 128, (count, 16, 16, 3)) + 127 * labels[:, None, None, None]
        np.savez(folder / f"{split}.npz", images=images.astype(np.uint8), labels=labels)


Train = Callable[..., "Outcome"]


@pytest.fixture
def train(run_script: RunScript, tmp_path: Path, added: None) -> Train:
    """`train(command of the page, "run", "--training.steps=4")`, with a tiny model."""

    def run(command: str, name: str, *flags: str) -> Outcome:
        torchditan, *arguments = shlex.split(command)
        assert torchditan == "torchditan"
        if not (tmp_path / "flowers").exists():
            write_flowers(tmp_path / "flowers")
        where = [f"--job.dump_folder={tmp_path}", f"--metrics.experiment_name={name}"]
        return run_script(torchditan, *arguments, *shlex.split(TINY), *where, *flags)

    return run


def assert_same_run(whole: Path, resumed: Path, *, step: int) -> None:
    losses = [[row["loss"] for row in read_metrics(run)] for run in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == step
    states = [read_state(run / f"checkpoint/step-{step:08d}") for run in (whole, resumed)]
    assert states[0].keys() == states[1].keys()
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_example_of_the_page_trains_validates_samples_and_resumes_to_the_bit(
    title: str, train: Train, run_script: RunScript, tmp_path: Path
) -> None:
    command = examples()[title].command
    for name, steps in (("whole", (4,)), ("resumed", (2, 4))):
        for last in steps:
            outcome = train(command, name, "--checkpoint.enable_checkpoint", f"--training.steps={last}")
            assert outcome.code == 0, outcome.err
    assert "resumed at step 2" in outcome.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", step=4)
    records = read_metrics(tmp_path / "whole")
    for name in LOGGED.get(title, ()):
        assert all(isinstance(record[name], float) for record in records), name
    validated = [row["validation_loss"] for row in read_metrics(tmp_path / "whole") if "validation_loss" in row]
    assert validated[1] < validated[0]
    assert (tmp_path / "whole/samples/step_00000004.png").exists()
    assert run_script("torchditan", "generate", tmp_path / "whole", f"--out={tmp_path / 'grid.png'}").code == 0


@pytest.mark.parametrize("title", FROM_OUTSIDE)
def test_the_example_works_from_outside_the_package_and_is_found_again(
    title: str, run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, (option, value) = examples()[title], FROM_OUTSIDE[title]
    module = f"lab_{re.sub(r'[^a-z]', '_', title.lower())}"
    (tmp_path / f"{module}.py").write_text(example.code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    name, _, options = value.partition(" ")
    (place,) = re.findall(rf'"{name}": "[\w.]+:(\w+)"', example.line)
    own = f"{module}:{place} {options}".strip()
    flags = [*shlex.split(TINY), f"--job.dump_folder={tmp_path}", "--metrics.experiment_name=run"]
    start = ["--job.config_file=quickstart", "--checkpoint.enable_checkpoint", *flags, f"--{option}={own}"]
    for last in (2, 4):
        outcome = run_script("train.py", *start, f"--training.steps={last}")
        assert outcome.code == 0, outcome.err
    assert "resumed at step 2" in outcome.out
    section, _, key = option.partition(".")
    stored = json.loads((tmp_path / "run/config.json").read_text())["config"][section][key]
    assert stored in (own, [own])
    assert run_script("torchditan", "generate", tmp_path / "run", f"--out={tmp_path / 'grid.png'}").code == 0
    changed = example.code + "\n# changed\n"
    (tmp_path / f"{module}.py").write_text(changed, encoding="utf-8")
    outcome = run_script("train.py", *start, "--training.steps=5")
    if section in ("sampling", "metrics"):  # changes no weight
        assert outcome.code == 0
    else:
        assert outcome.code == 2
        assert f"the file of {own.split()[0]} was changed since the run began" in outcome.err.splitlines()[-1]


def test_a_second_time_starts_from_the_weights_of_a_run_without_it(train: Train, tmp_path: Path) -> None:
    keep = ["--checkpoint.enable_checkpoint", "--training.steps=2", "--optimizer.lr=0"]
    assert train(examples()["objective"].command, "plain", *keep, "--diffusion.objective=flow_matching").code == 0
    flags = [*keep, f"--checkpoint.initial_load_path={tmp_path / 'plain'}", "--ema.enable=false"]
    outcome = train(examples()[NUMBERS].command, "noisy", *flags)
    assert outcome.code == 0, outcome.err
    assert "; new scalar_embedders.s" in outcome.out
    before, after = (read_state(tmp_path / f"{name}/checkpoint/step-00000002") for name in ("plain", "noisy"))
    assert {name for name in after if name.startswith("model.")} - before.keys() == {
        f"model.scalar_embedders.s.mlp.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("outside", [False, True])
def test_the_text_encoder_of_the_page_trains_draws_and_keeps_its_cache(
    outside: bool, run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "captioned").mkdir()
    for number in range(4):
        Image.new("RGB", (16, 16), (60 * number, 90, 200 - 60 * number)).save(tmp_path / f"captioned/{number}.png")
        (tmp_path / f"captioned/{number}.txt").write_text(f"a ball of number {number}")
    with extending_page.added(["text encoder"], tmp_path / "added"):
        _, _, *arguments = shlex.split(examples()["text encoder"].command)
        tiny = [flag for flag in shlex.split(TINY) if "max_classes" not in flag]
        flags = [*arguments, *tiny, "--validation.freq=0", f"--job.dump_folder={tmp_path}"]
        if outside:
            (tmp_path / "lab_characters.py").write_text(examples()["text encoder"].code, encoding="utf-8")
            monkeypatch.syspath_prepend(str(tmp_path))
            flags.append("--text_encoder.name=lab_characters:Characters width=8")
        outs = []
        for last in (1, 2):
            run = ["--metrics.experiment_name=run", "--checkpoint.enable_checkpoint", f"--training.steps={last}"]
            outcome = run_script("train.py", *flags, *run)
            assert outcome.code == 0, outcome.err
            outs.append(outcome.out)
        assert "encoding captions" in outs[0] and "encoding captions" not in outs[1] and "resumed at step 1" in outs[1]
        stored = read_state(tmp_path / "run/checkpoint/step-00000002")
        assert stored["model.text_embedder.proj.weight"].shape[1] == (8 if outside else 32)
        drawn = run_script(
            "torchditan", "generate", tmp_path / "run", "--prompts", "a ball", f"--out={tmp_path / 'g.png'}"
        )
        assert drawn.code == 0, drawn.err


@pytest.mark.parametrize("outside", [False, True])
def test_the_sequential_dataset_of_the_page_trains_and_resumes_to_the_bit(
    outside: bool, run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchdata")
    with extending_page.added(["sequential dataset"], tmp_path / "added"):
        _, _, *arguments = shlex.split(examples()["sequential dataset"].command)
        flags = [*arguments, *shlex.split(TINY), "--validation.freq=0", "--checkpoint.enable_checkpoint"]
        if outside:
            (tmp_path / "lab_stripes.py").write_text(examples()["sequential dataset"].code, encoding="utf-8")
            monkeypatch.syspath_prepend(str(tmp_path))
            flags.append("--dataset.dataset_name=lab_stripes:build")
        for name, steps in (("whole", (4,)), ("resumed", (2, 4))):
            where = [f"--job.dump_folder={tmp_path}", f"--metrics.experiment_name={name}"]
            for last in steps:
                outcome = run_script("train.py", *flags, *where, f"--training.steps={last}")
                assert outcome.code == 0, outcome.err
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", step=4)


@pytest.mark.parametrize(("title", "option", "value", "default"), CHOICES, ids=[choice[0] for choice in CHOICES])
def test_a_run_is_not_continued_with_another_one(
    title: str, option: str, value: str, default: str, train: Train, tmp_path: Path
) -> None:
    command = examples()[title].command
    keep = ["--checkpoint.enable_checkpoint", "--metrics.enable_sampling=false"]
    assert train(command, "run", "--training.steps=1", *keep).code == 0
    outcome = train(command, "run", "--training.steps=2", f"--{option}={default}", *keep)
    assert outcome.code == 2 and f"{option} is {value} there and {default} here" in outcome.err
    assert train(command, "other", "--training.steps=1", f"--{option}={default}", *keep).code == 0
    moved = tmp_path / "run/checkpoint/step-00000002"
    shutil.move(tmp_path / "run/checkpoint/step-00000001", moved.with_name("step-00000001.aside"))
    shutil.move(tmp_path / "other/checkpoint/step-00000001", tmp_path / "run/checkpoint/step-00000001")
    outcome = train(command, "run", "--training.steps=2", *keep)
    assert outcome.code == 2 and f"{option} is {default} there and {value} here" in outcome.err


def test_a_run_is_not_continued_with_another_block(train: Train) -> None:
    command = examples()["block"].command
    keep = ["--checkpoint.enable_checkpoint", "--metrics.enable_sampling=false"]
    assert train(command, "parallel", "--training.steps=1", *keep).code == 0
    outcome = train(command, "parallel", "--training.steps=2", "--model.block=dit", *keep)
    assert outcome.code == 2 and "model.block is parallel there and dit here" in outcome.err
    assert train(command, "dit", "--training.steps=1", "--model.block=dit", *keep).code == 0
    outcome = train(command, "dit", "--training.steps=2", *keep)
    assert outcome.code == 2 and "model.block is dit there and parallel here" in outcome.err


def test_a_run_is_not_continued_with_other_data(train: Train, tmp_path: Path) -> None:
    command = examples()["dataset"].command
    keep = ["--checkpoint.enable_checkpoint", "--metrics.enable_sampling=false"]
    assert train(command, "run", "--training.steps=1", *keep).code == 0
    shutil.move(tmp_path / "flowers", tmp_path / "moved")
    moved = [*keep, f"--dataset.root_dir={tmp_path / 'moved'}"]
    assert train(command, "run", "--training.steps=2", *moved).code == 0
    write_flowers(tmp_path / "moved", seed=1)
    outcome = train(command, "run", "--training.steps=3", *moved)
    assert outcome.code == 2 and "dataset.fingerprint is flowers-" in outcome.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dataset.root_dir=nowhere", 'root_dir = "nowhere": does not exist; flowers needs a folder with train.npz'),
        ("--dataset.num_classes=1", "dataset.num_classes = 1: flowers has 2 classes"),
        ("--dataset.image_size=32", "dataset.image_size = [32, 32]: flowers is 16 x 16"),
        ("--model.input_channels=1", "model.input_channels = 1: flowers has 3 channel(s)"),
    ],
)
def test_the_dataset_of_the_page_is_checked_like_ours(flags: str, message: str, train: Train) -> None:
    outcome = train(examples()["dataset"].command, "run", *flags.split())
    assert (outcome.code, outcome.err.count("\n")) == (2, 1) and message in outcome.err


def test_a_dataset_without_what_is_required_ends_with_one_line_and_code_2(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr("torchditan.datasets.flowers.Flowers.sample_shape")
    outcome = train(examples()["dataset"].command, "run", "--training.steps=1")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert '"flowers": its class Flowers has no sample_shape ((C, H, W)); see docs/extending.md' in outcome.err
    assert not (tmp_path / "run").exists()


def test_the_dataset_of_the_page_trains_without_labels_and_is_encoded(
    train: Train, run_script: RunScript, tmp_path: Path
) -> None:
    command = examples()["dataset"].command
    assert train(command, "run", "--training.steps=1", "--dataset.num_classes=0").code == 0
    flags = ["--dataset.dataset_name=flowers", "--dataset.root_dir=flowers", "--autoencoder.name=haar"]
    encoded = run_script("torchditan", "encode", tmp_path / "latents", *flags)
    assert encoded.code == 0, encoded.err
    stored = json.loads((tmp_path / "run/config.json").read_text())["config"]["dataset"]["fingerprint"]
    index = json.loads((tmp_path / "latents/train/index.json").read_text())
    assert stored in json.dumps(index)


def block_flags(*flags: str) -> list[str]:
    _, _, *arguments = shlex.split(examples()["block"].command)
    return [*arguments, *shlex.split(TINY), "--training.steps=2", "--metrics.enable_sampling=false", *flags]


ADD_AND_TRAIN = f"""
import runpy, sys
from pathlib import Path
sys.path.insert(1, {str(Path(__file__).parent)!r})
from test_extending import add_to_the_repository
add_to_the_repository(Path(sys.argv.pop(1)))
runpy.run_path({str(REPOSITORY / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_the_block_of_the_page_is_sharded_checkpointed_and_compiled_with_the_same_losses(
    run_distributed: RunDistributed, tmp_path: Path
) -> None:
    script = tmp_path / "add_and_train.py"
    script.write_text(ADD_AND_TRAIN, encoding="utf-8")
    losses = {}
    for world_size, name, flags in [
        (1, "one", []),
        (
            2,
            "two",
            [
                "--training.data_parallel_shard_degree=2",
                "--activation_checkpoint.mode=full",
                "--training.compile",
                "--compile.backend=aot_eager",
            ],
        ),
    ]:
        where = [f"--job.dump_folder={tmp_path}", f"--metrics.experiment_name={name}"]
        run = run_distributed([script, tmp_path / "added", *block_flags(*flags, *where)], world_size)
        assert run.returncode == 0, run.stderr
        losses[name] = [row["loss"] for row in read_metrics(tmp_path / name)]
    assert len(losses["one"]) == 2
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("conditioning", ["adaln", "in_context"])
def test_the_block_of_the_page_is_counted_planned_and_filled(conditioning: str) -> None:
    flags = ["--model.flavor=debugmodel", f"--model.conditioning={conditioning}"]
    specs = {
        block: build_model_spec(
            load_config([*flags, f"--model.block={block}"]).model, sample_shape=(1, 8, 8), num_classes=10
        )
        for block in ("dit", "parallel")
    }
    flops = {block: count_model_flops(spec) for block, spec in specs.items()}
    assert flops["parallel"].attention == flops["dit"].attention
    assert flops["parallel"].per_token == flops["dit"].per_token
    # Three vectors of width D in each of the blocks instead of six; a product counts 2, and 3 times with the backward.
    size = FLAVORS["debugmodel"]
    modulation = 6 * size.depth * 3 * size.width**2 if conditioning == "adaln" else 0
    assert flops["dit"].per_image - flops["parallel"].per_image == modulation
    plans = {
        block: plan_run(
            load_config(["--job.config_file=quickstart", *flags, f"--model.block={block}"]), device="cpu", num_devices=2
        )
        for block in specs
    }
    assert 0 < plans["parallel"].peak.total < plans["dit"].peak.total

    model = specs["parallel"].build()
    model.init_weights(0)
    x, c = torch.randn(2, 5, size.width), torch.randn(2, size.width)
    block = model.blocks[0]
    if conditioning == "adaln":
        assert torch.equal(block(x, c, None), x)
        return
    std = 0.02 / (2 * size.depth) ** 0.5
    for name in ("attn.proj", "mlp.w3"):
        assert block.get_submodule(name).weight.std().item() == pytest.approx(std, rel=0.1)
    assert not torch.equal(block(x, None, None), x)


@pytest.mark.usefixtures("added")
def test_a_block_refuses_options_itself_and_published_models_refuse_a_block() -> None:
    text = ["--model.text=cross_attention", "--model.text_tokens=4", "--model.text_width=8"]
    config = load_config(["--model.block=parallel", *text])
    with pytest.raises(ConfigError, match=r'model.text = "cross_attention": the parallel block has no cross-attention'):
        build_model_spec(config.model, sample_shape=(1, 8, 8), num_classes=0)
    with pytest.raises(ConfigError, match=r'model.block = "parallel": flux defines its own; leave it out'):
        load_config(["--model.name=flux", "--model.flavor=debugmodel", "--model.block=parallel"])


@pytest.mark.usefixtures("added")
def test_the_objective_of_the_page_samples_what_it_was_trained_to_predict() -> None:
    spec = build_model_spec(Config().model, sample_shape=(1, 8, 8), num_classes=10)
    objective = build_objective(Diffusion(objective="x_prediction"), spec)
    x, noise = torch.randn(2, 4, 1, 8, 8).unbind()
    batch = {"sample": x, "class_label": torch.zeros(4, dtype=torch.int64)}
    randomness = draw(0, range(4), (1, 8, 8))
    assert objective.loss(lambda x_t, t, cond: x, batch, randomness).max() == 0
    assert objective.loss(lambda x_t, t, cond: x - randomness.noise, batch, randomness).min() > 0.1
    sampling = Sampling(num_steps=20)
    samples = objective.sample(lambda x_t, t: x, noise, sampling=sampling, step_noise=lambda step: noise)
    torch.testing.assert_close(samples, x)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--sampling.sampler=heun",
            'sampling.sampler = "heun": x_prediction divides by 1 - t, and heun ends with t = 1',
        ),
        ("--model.learn_sigma", "model.learn_sigma = true: flow matching does not predict a variance"),
        ("--model.name=flux --model.flavor=debugmodel", "flux was trained with flow_matching"),
    ],
)
def test_the_objective_of_the_page_refuses_options_itself(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(["--diffusion.objective=x_prediction", *flags.split()])


@pytest.mark.usefixtures("added")
def test_choices_follow_the_registry() -> None:
    names = "flow_matching, ddpm, imf, x_prediction, noisy_data, or module:name"
    with pytest.raises(ConfigError, match=f"{names}; did you mean x_pred"):
        load_config(["--diffusion.objective=x_predicton"])
    with pytest.raises(
        ConfigError, match=r"AdamW, AdamW8bit, Muon, PlainMuon, or module:name; did you mean PlainMuon\?"
    ):
        load_config(["--optimizer.name=plainmuon"])
    with pytest.raises(ConfigError, match=r"must be one of dit, .*parallel, or module:name; did you mean parallel\?"):
        load_config(["--model.block=paralel"])


def test_every_registered_name_is_there() -> None:
    for name in registry.OBJECTIVES:
        objective = registry.registered(registry.OBJECTIVES, name)
        assert issubclass(objective, Objective)
    for name in registry.BLOCKS:
        assert issubclass(registry.registered(registry.BLOCKS, name), Block)
    for name in registry.OPTIMIZERS:
        assert all(isinstance(group, ParameterGroup) for group in parameter_groups(Optimizer(name=name)))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.usefixtures("added")
def test_the_ingredient_of_the_page_refuses_an_option_that_it_lacks() -> None:
    spec = build_model_spec(Config().model, sample_shape=(1, 8, 8), num_classes=10)
    message = "strength is not an option of layer_sync; its options are weight"
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_objective(Diffusion(ingredients=["layer_sync strength=1"]), spec)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def momentum(config: Optimizer) -> list[ParameterGroup]:
    options = {"lr": config.lr, "momentum": config.beta1, "weight_decay": config.weight_decay}
    return [ParameterGroup(torch.optim.SGD, options)]


def no_state(config: Optimizer) -> list[ParameterGroup]:
    return [ParameterGroup(torch.optim.SGD, {"lr": config.lr})]


OWN = {"momentum": f"{__name__}:momentum", "no_state": f"{__name__}:no_state"}
NAMES = ["AdamW", "Muon", "PlainMuon", "momentum", "no_state"]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors of the optimizer's state, by parameter and name."""
    found = {}
    for part in optimizer_parts(optimizer):
        for name, parameter in model.named_parameters():
            for key, value in part.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = whole(value).clone()
    return found


def assert_equal_states(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name, value in left.items() if not torch.equal(value, right[name])] == []


def continue_run(rank: int, world_size: int, folder: str, name: str, *, resume: bool) -> dict[str, Any]:
    """Six steps with a checkpoint of the third, or those after it."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{world_size}-{resume}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        model: Any = Blocks()
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",)))
        config = Config(optimizer=Optimizer(name=name, lr=0.05, weight_decay=0.1))
        optimizer = build_optimizer(model, config.optimizer)
        guard = DivergenceGuard(optimizer)
        tensors = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}
        state = RunState(Progress(), tensors=tensors)
        checkpoints = CheckpointManager(Path(folder), state, config=config, timeout_seconds=60)
        assert not resume or checkpoints.load_latest()
        losses = []
        stored = state_of(model, optimizer)
        for step in range(state.progress.step, 6):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - x.abs()).square().mean()
            loss.backward()
            guard.step(step, clip_grad_norm(list(model.parameters()), max_norm=0))
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 2 and not resume:
                state.progress.step = 3
                checkpoints.save()
                stored = state_of(model, optimizer)
        weights = [parameter.full_tensor().detach() for parameter in model.parameters()]
        return {"losses": losses, "weights": weights, "stored": stored}
    finally:
        dist.destroy_process_group()


def run_and_resume(rank: int, world_size: int, folder: str, name: str) -> None:
    if "PlainMuon" not in registry.OPTIMIZERS:
        add_to_the_repository(Path(folder) / f"added-{rank}")
    registry.OPTIMIZERS.update(OWN)
    whole, again = (continue_run(rank, world_size, folder, name, resume=resume) for resume in (False, True))
    assert whole["losses"][3:] == again["losses"] and len(again["losses"]) == 3
    assert whole["losses"][-1] < whole["losses"][0]
    assert_equal_states(whole["stored"], again["stored"])
    for left, right in zip(whole["weights"], again["weights"], strict=True):
        assert torch.equal(left, right)
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("name", NAMES)
def test_any_optimizer_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    run_and_resume(0, 1, str(tmp_path), name)


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server", "added")
@pytest.mark.parametrize("name", NAMES)
def test_any_optimizer_resumes_to_the_bit_on_two_ranks_and_within_rounding_on_one(name: str, tmp_path: Path) -> None:
    mp.start_processes(run_and_resume, args=(2, str(tmp_path), name), nprocs=2, start_method="forkserver")
    registry.OPTIMIZERS.update(OWN)
    whole = torch.load(tmp_path / "whole.pt")
    alone = continue_run(0, 1, str(tmp_path), name, resume=True)
    assert_equal_states(whole["stored"], alone["stored"])
    # Muon orthogonalises in bfloat16. The gradients, and the sums of torch's Muon, depend on the order of the shards.
    rounding = 1e-3 if "Muon" in name else 1e-5
    assert alone["losses"] == pytest.approx(whole["losses"][3:], rel=rounding)
    for left, right in zip(whole["weights"], alone["weights"], strict=True):
        torch.testing.assert_close(left, right, atol=5 * rounding, rtol=0)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("name", NAMES)
def test_the_planner_counts_the_state_that_an_optimizer_really_has(name: str) -> None:
    registry.OPTIMIZERS.update(OWN)
    model = Blocks()
    config = Optimizer(name=name)
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    real = sum(value.nbytes for value in state_of(model, optimizer).values())
    weights = [Weight(key, tuple(value.shape), is_trained=True) for key, value in model.named_parameters()]
    planned = model_state(Parameters(blocks=[], root=weights), num_shards=1, optimizer=config)["optimizer"]
    assert planned == real
    assert (real == 0) == (name == "no_state")


@pytest.mark.usefixtures("added")
def test_groups_share_out_parameters_decay_and_rate() -> None:
    model = Blocks()
    optimizer = build_optimizer(model, Optimizer(name="PlainMuon", weight_decay=0.1))
    assert isinstance(optimizer, OptimizerParts)
    muon, adamw = optimizer.parts
    shapes = [[tuple(p.shape) for group in part.param_groups for p in group["params"]] for part in (muon, adamw)]
    assert shapes == [[(12, 8), (8, 12)], [(8, 8), (12,), (8,), (8,)]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert not DivergenceGuard(optimizer).is_fused and DivergenceGuard(OptimizerParts([adamw])).is_fused
