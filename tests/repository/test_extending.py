# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/extending.md: its objective and its optimizer, read from the page, train, sample, resume and are planned."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchditan
import torchditan.diffusion
from torchditan import registry
from torchditan.checkpoint.loading import Progress, read_state
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.config.errors import ConfigError
from torchditan.config.loader import load_config
from torchditan.config.options import Config, Diffusion, Optimizer, Sampling
from torchditan.diffusion.objectives import build_objective
from torchditan.models import build_model_spec
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
from torchditan.randomness import draw
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunScript

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
TINY = """
    --model.flavor=debugmodel --training.mixed_precision_param=float32 --training.global_batch_size=16
    --lr_scheduler.schedule=constant --lr_scheduler.warmup_steps=0 --metrics.log_freq=1 --metrics.sample_freq=0
    --validation.freq=2 --validation.num_images=16 --sampling.num_steps=4 --sampling.max_classes=2
    --sampling.images_per_class=2
"""


def examples() -> list[tuple[str, str, str, str]]:
    """(path of the file, its code, line of the registry, command) of each example on the page."""
    found = []
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        (path,) = re.findall(r"file is\s+`torchditan/([\w/]+\.py)`", section)
        code, line = re.findall(r"^```python\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
        (command,) = re.findall(r"^```bash\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
        found.append((path, code, line, command))
    return found


def add_to_the_package(folder: Path) -> None:
    """Do what the page says, with the files in `folder` instead of the repository."""
    objective, optimizer = examples()
    for path, code, _, _ in (objective, optimizer):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(code, encoding="utf-8")
    registry.OBJECTIVES.update(ast.literal_eval(f"{{{objective[2]}}}"))
    registry.OPTIMIZERS.update(ast.literal_eval(f"{{{optimizer[2]}}}"))
    torchditan.__path__.append(str(folder))
    torchditan.diffusion.__path__.append(str(folder / "diffusion"))


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    objectives, optimizers = dict(registry.OBJECTIVES), dict(registry.OPTIMIZERS)
    monkeypatch.setattr(torchditan, "__path__", list(torchditan.__path__))
    monkeypatch.setattr(torchditan.diffusion, "__path__", list(torchditan.diffusion.__path__))
    add_to_the_package(tmp_path / "added")
    yield
    for entries, before in ((registry.OBJECTIVES, objectives), (registry.OPTIMIZERS, optimizers)):
        entries.clear()
        entries.update(before)
    for path, *_ in examples():
        sys.modules.pop(f"torchditan.{path.removesuffix('.py').replace('/', '.')}", None)


Train = Callable[..., "Outcome"]


@pytest.fixture
def train(run_script: RunScript, tmp_path: Path, added: None) -> Train:
    """`train(command of the page, "run", "--training.steps=4")`, with a tiny model."""

    def run(command: str, name: str, *flags: str) -> Outcome:
        python, script, *arguments = shlex.split(command)
        assert python == "python"
        where = [f"--job.dump_folder={tmp_path}", f"--metrics.experiment_name={name}"]
        return run_script(script, *arguments, *shlex.split(TINY), *where, *flags)

    return run


def assert_same_run(whole: Path, resumed: Path, *, step: int) -> None:
    losses = [[row["loss"] for row in read_metrics(run)] for run in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == step
    states = [read_state(run / f"checkpoint/step-{step:08d}") for run in (whole, resumed)]
    assert states[0].keys() == states[1].keys()
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []


@pytest.mark.parametrize("number", [0, 1], ids=["objective", "optimizer"])
def test_the_example_of_the_page_trains_validates_samples_and_resumes_to_the_bit(
    number: int, train: Train, run_script: RunScript, tmp_path: Path
) -> None:
    command = examples()[number][3]
    for name, steps in (("whole", (4,)), ("resumed", (2, 4))):
        for last in steps:
            outcome = train(command, name, "--checkpoint.enable_checkpoint", f"--training.steps={last}")
            assert outcome.code == 0, outcome.err
    assert "resumed at step 2" in outcome.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", step=4)
    validated = [row["validation_loss"] for row in read_metrics(tmp_path / "whole") if "validation_loss" in row]
    assert validated[1] < validated[0]
    assert (tmp_path / "whole/samples/step_00000004.png").exists()
    assert run_script("scripts/generate.py", tmp_path / "whole", f"--out={tmp_path / 'grid.png'}").code == 0


@pytest.mark.parametrize("number", [0, 1], ids=["objective", "optimizer"])
def test_a_run_is_not_continued_with_another_one(number: int, train: Train, tmp_path: Path) -> None:
    command = examples()[number][3]
    option, value, default = [
        ("diffusion.objective", "x_prediction", "flow_matching"),
        ("optimizer.name", "Muon", "AdamW"),
    ][number]
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


@pytest.mark.usefixtures("added")
def test_the_objective_of_the_page_samples_what_it_was_trained_to_predict() -> None:
    spec = build_model_spec(Config().model, sample_shape=(1, 8, 8), num_classes=10)
    objective = build_objective(Diffusion(objective="x_prediction"), spec)
    x, noise = torch.randn(2, 4, 1, 8, 8).unbind()
    batch = {"sample": x, "class_label": torch.zeros(4, dtype=torch.int64)}
    randomness = draw(0, range(4), (1, 8, 8))
    assert objective.loss(lambda x_t, t, cond: x, batch, randomness).max() == 0
    assert objective.loss(lambda x_t, t, cond: x - randomness.noise, batch, randomness).min() > 0.1
    samples = objective.sample(lambda x_t, t: x, noise, sampling=Sampling(num_steps=20))
    torch.testing.assert_close(samples, x)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--sampling.sampler=heun",
            'sampling.sampler = "heun": x_prediction divides by 1 - t, and heun ends with t = 1',
        ),
        ("--model.learn_sigma", "model.learn_sigma = true: flow matching predicts no variance"),
        ("--model.name=flux --model.flavor=debugmodel", "flux was trained with flow_matching"),
    ],
)
def test_the_objective_of_the_page_refuses_options_itself(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(["--diffusion.objective=x_prediction", *flags.split()])


@pytest.mark.usefixtures("added")
def test_choices_follow_the_registry() -> None:
    with pytest.raises(ConfigError, match=r"flow_matching, ddpm, x_prediction; did you mean x_pred"):
        load_config(["--diffusion.objective=x_predicton"])
    with pytest.raises(ConfigError, match=r"AdamW, AdamW8bit, Muon; did you mean Muon\?"):
        load_config(["--optimizer.name=muon"])


def test_every_registered_name_is_there() -> None:
    for name in registry.OBJECTIVES:
        objective = registry.registered(registry.OBJECTIVES, name)
        assert [part for part in ("build", "option_mistakes", "loss", "sample") if not hasattr(objective, part)] == []
    for name in registry.OPTIMIZERS:
        assert all(isinstance(group, ParameterGroup) for group in parameter_groups(Optimizer(name=name)))


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
NAMES = ["AdamW", "Muon", "momentum", "no_state"]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors of the optimizer's state, by parameter and name."""
    found = {}
    for part in optimizer_parts(optimizer):
        for name, parameter in model.named_parameters():
            for key, value in part.state.get(parameter, {}).items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{name}.{key}"] = whole.clone()
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
        config = Config()
        config.optimizer = Optimizer(name=name, lr=0.05, weight_decay=0.1)
        optimizer = build_optimizer(model, config.optimizer)
        guard = DivergenceGuard(optimizer)
        checkpoints = CheckpointManager(
            Path(folder), model=model, ema=None, optimizer=optimizer, config=config, timeout_seconds=60
        )
        loaded = checkpoints.load_latest() if resume else None
        losses = []
        stored = state_of(model, optimizer)
        for step in range(loaded[0].step if loaded else 0, 6):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - x.abs()).square().mean()
            loss.backward()
            guard.step(step, clip_grad_norm(list(model.parameters()), max_norm=0))
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 2 and not resume:
                checkpoints.save(Progress(step=3))
                stored = state_of(model, optimizer)
        weights = [parameter.full_tensor().detach() for parameter in model.parameters()]
        return {"losses": losses, "weights": weights, "stored": stored}
    finally:
        dist.destroy_process_group()


def run_and_resume(rank: int, world_size: int, folder: str, name: str) -> None:
    if "Muon" not in registry.OPTIMIZERS:
        add_to_the_package(Path(folder) / f"added-{rank}")
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
@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("name", NAMES)
def test_any_optimizer_resumes_to_the_bit_on_two_ranks_and_within_rounding_on_one(name: str, tmp_path: Path) -> None:
    mp.spawn(run_and_resume, args=(2, str(tmp_path), name), nprocs=2)
    registry.OPTIMIZERS.update(OWN)
    whole = torch.load(tmp_path / "whole.pt")
    alone = continue_run(0, 1, str(tmp_path), name, resume=True)
    assert_equal_states(whole["stored"], alone["stored"])
    # Muon orthogonalises in bfloat16, and the order of its sums depends on the shards.
    rounding = {"Muon": 1e-3}.get(name, 1e-5)
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
    optimizer = build_optimizer(model, Optimizer(name="Muon", weight_decay=0.1))
    assert isinstance(optimizer, OptimizerParts)
    muon, adamw = optimizer.parts
    shapes = [[tuple(p.shape) for group in part.param_groups for p in group["params"]] for part in (muon, adamw)]
    assert shapes == [[(12, 8), (8, 12)], [(8, 8), (12,), (8,), (8,)]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert not DivergenceGuard(optimizer).is_fused and DivergenceGuard(OptimizerParts([adamw])).is_fused
