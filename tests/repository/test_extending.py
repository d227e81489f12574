# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/extending.md: the examples on the page train, sample, resume and can be planned."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import extending_page
import numpy as np
import pytest
import torch
from extending_page import examples
from PIL import Image
from torch import nn

from torchditan import registry
from torchditan.checkpoint.loading import read_state
from torchditan.config.loader import load_config
from torchditan.config.options import Config, Diffusion, Optimizer, Sampling
from torchditan.datasets import images
from torchditan.diffusion.objectives import build_objective
from torchditan.errors import ConfigError
from torchditan.extras.planner.memory import Parameters, Weight, model_state
from torchditan.extras.planner.plan import plan_run
from torchditan.models import build_model_spec
from torchditan.models.dit import FLAVORS
from torchditan.models.flops import count_model_flops
from torchditan.optim.divergence import DivergenceGuard
from torchditan.optim.optimizers import OptimizerParts, ParameterGroup, build_optimizer, optimizer_parts
from torchditan.randomness import draw
from torchditan.run.reading import read_metrics

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
EXAMPLES = (
    "objective",
    INSIDE,
    "sampler",
    "schedule",
    "meter",
    "optimizer",
    "block",
    "dataset",
)
"""Titles of sections; test_extending_evaluation.py has the others."""


LOGGED = {INSIDE: ("similarity",), "meter": ("update_cosine",)}
FROM_OUTSIDE = {
    INSIDE: ("diffusion.ingredients", "layer_sync"),
    "sampler": ("sampling.sampler", "midpoint"),
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


def test_the_text_encoder_of_the_page_trains_draws_and_keeps_its_cache(run_script: RunScript, tmp_path: Path) -> None:
    (tmp_path / "captioned").mkdir()
    for number in range(4):
        Image.new("RGB", (16, 16), (60 * number, 90, 200 - 60 * number)).save(tmp_path / f"captioned/{number}.png")
        (tmp_path / f"captioned/{number}.txt").write_text(f"a ball of number {number}")
    with extending_page.added(["text encoder"], tmp_path / "added"):
        _, _, *arguments = shlex.split(examples()["text encoder"].command)
        tiny = [flag for flag in shlex.split(TINY) if "max_classes" not in flag]
        flags = [*arguments, *tiny, "--validation.freq=0", f"--job.dump_folder={tmp_path}"]
        outs = []
        for last in (1, 2):
            run = ["--metrics.experiment_name=run", "--checkpoint.enable_checkpoint", f"--training.steps={last}"]
            outcome = run_script("train.py", *flags, *run)
            assert outcome.code == 0, outcome.err
            outs.append(outcome.out)
        assert "encoding captions" in outs[0] and "encoding captions" not in outs[1] and "resumed at step 1" in outs[1]
        stored = read_state(tmp_path / "run/checkpoint/step-00000002")
        assert stored["model.text_embedder.proj.weight"].shape[1] == 32
        drawn = run_script(
            "torchditan", "generate", tmp_path / "run", "--prompts", "a ball", f"--out={tmp_path / 'g.png'}"
        )
        assert drawn.code == 0, drawn.err


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


ADD_AND_TRAIN = f"""
import runpy, sys
from pathlib import Path
sys.path.insert(1, {str(Path(__file__).parent)!r})
from test_extending import add_to_the_repository
add_to_the_repository(Path(sys.argv.pop(1)))
runpy.run_path({str(REPOSITORY / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_block_and_optimizer_of_the_page_have_one_curve_on_two_ranks_and_resume_on_one(
    run_distributed: RunDistributed, tmp_path: Path
) -> None:
    """Sharded, checkpointed and compiled on the two ranks."""
    script = tmp_path / "add_and_train.py"
    script.write_text(ADD_AND_TRAIN, encoding="utf-8")
    _, _, *arguments = shlex.split(examples()["block"].command)
    flags = [*arguments, *shlex.split(TINY), "--optimizer.name=PlainMuon", "--metrics.enable_sampling=false"]
    flags += ["--checkpoint.enable_checkpoint", f"--job.dump_folder={tmp_path}"]
    two = ["--activation_checkpoint.mode=full", "--training.compile", "--compile.backend=aot_eager"]
    for name, world_size, more in [("one", 1, []), ("two", 2, [*two, "--training.steps=2"]), ("two", 1, [])]:
        job = [*flags, "--training.steps=4", f"--metrics.experiment_name={name}", *more]
        run = run_distributed([script, tmp_path / f"added-{world_size}", *job], world_size)
        assert run.returncode == 0, run.stderr
    one, two_then_one = ([row["loss"] for row in read_metrics(tmp_path / name)] for name in ("one", "two"))
    assert two_then_one == pytest.approx(one, rel=1e-3), "Muon orthogonalises in bfloat16"


@pytest.mark.usefixtures("added")
def test_the_block_of_the_page_is_counted_planned_and_filled() -> None:
    flags = ["--model.flavor=debugmodel"]
    specs = {
        block: build_model_spec(
            load_config([*flags, f"--model.block={block}"]).model, sample_shape=(1, 8, 8), num_classes=10
        )
        for block in ("dit", "parallel")
    }
    flops = {block: count_model_flops(spec) for block, spec in specs.items()}
    # Three vectors of width D in each of the blocks instead of six; a product counts 2, and 3 times with the backward.
    size = FLAVORS["debugmodel"]
    assert flops["dit"].total - flops["parallel"].total == 6 * size.depth * 3 * size.width**2
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
    assert torch.equal(model.blocks[0](x, c, None), x)


@pytest.mark.usefixtures("added")
def test_a_block_refuses_options_itself_and_published_models_refuse_a_block() -> None:
    text = ["--model.text=cross_attention", "--model.text_tokens=4", "--model.text_width=8"]
    config = load_config(["--model.block=parallel", *text])
    with pytest.raises(ConfigError, match=r'model.text = "cross_attention": the parallel block has no cross-attention'):
        build_model_spec(config.model, sample_shape=(1, 8, 8), num_classes=0)
    with pytest.raises(ConfigError, match=r'model.block = "parallel": .*published; leave it out'):
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
def test_the_objective_of_the_page_refuses_options_itself() -> None:
    with pytest.raises(ConfigError, match=r'sampling\.sampler = "heun": x_prediction divides by 1 - t'):
        load_config(["--diffusion.objective=x_prediction", "--sampling.sampler=heun"])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def no_state(config: Optimizer) -> list[ParameterGroup]:
    return [ParameterGroup(torch.optim.SGD, {"lr": config.lr})]


OWN = {"no_state": f"{__name__}:no_state"}
NAMES = ["PlainMuon", "no_state"]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Tensors of the optimizer's state, by parameter and name."""
    found = {}
    for part in optimizer_parts(optimizer):
        for name, parameter in model.named_parameters():
            for key, value in part.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value
    return found


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


def test_an_image_format_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    text = extending_page.PAGE.read_text(encoding="utf-8").partition("## An image format\n")[2]
    entries = text.partition("```python\n")[2].partition("```")[0]
    names = dict(vars(images))
    exec(entries, names)
    qoi, jxl = names["FORMATS"]
    monkeypatch.setattr(images, "FORMATS", (qoi, dataclasses.replace(jxl, is_available=False)))
    monkeypatch.setattr(images, "_known_to_pillow", images._known_to_pillow.__wrapped__)
    with images.open_picture(b"qoif\0\0\0\1\0\0\0\1\3\0\xfe\1\2\3" + bytes(7) + b"\1") as picture:
        assert picture.decode(channels=3).getpixel((0, 0)) == (1, 2, 3)
    with pytest.raises(images.UnreadableError, match=jxl.install), images.open_picture(b"\0\0\0\x0cJXL \r\n\x87\n"):
        pass
