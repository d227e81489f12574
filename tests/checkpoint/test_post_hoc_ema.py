# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Snapshots of averages during training: exact resume, other ranks, a full disk; and averages rebuilt from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from full_disk import limit_writes
from refusals import assert_refused

import torchditan
from torchditan.checkpoint.files import list_checkpoints, step_of, verify
from torchditan.checkpoint.loading import read_state
from torchditan.checkpoint.post_hoc_ema import PostHocEMA, SnapshotManager
from torchditan.models.saved_weights import saved_weights
from torchditan.periodic_tasks import PeriodicTasks
from torchditan.run.reading import read_config, read_status
from torchditan.weights.exported import open_weights

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=4",
    "--optimizer.lr=0.003",
    "--metrics.enable_sampling=false",
    "--metrics.experiment_name=run",
    "--checkpoint.enable_checkpoint",
    "--ema.post_hoc_widths=0.05,0.1",
]
RECONSTRUCT = ("torchditan", "average")
State = dict[str, torch.Tensor]


def job(folder: Path, *flags: str) -> list[str]:
    return [*SMALL, f"--job.dump_folder={folder}", *flags]


def snapshots_of(run: Path) -> dict[int, Path]:
    return {step_of(path): path for path in list_checkpoints(run / "checkpoint" / "post_hoc_ema")}


def assert_same(left: State, right: State) -> None:
    assert left and left.keys() == right.keys()
    assert [name for name, tensor in left.items() if not torch.equal(tensor, right[name])] == []


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`crash(7)`: the next job fails after step 7, before it saves that step."""
    run_periodic_tasks = PeriodicTasks.run_periodic_tasks

    def at(step: int) -> None:
        def run(self: PeriodicTasks, *arguments: Any, **options: Any) -> None:
            if self.progress.step == step:
                monkeypatch.setattr(PeriodicTasks, "run_periodic_tasks", run_periodic_tasks)
                raise RuntimeError("killed")
            run_periodic_tasks(self, *arguments, **options)

        monkeypatch.setattr(PeriodicTasks, "run_periodic_tasks", run)

    return at


def test_a_crashed_run_resumes_with_the_same_averages_and_snapshots_to_the_bit(
    tmp_path: Path, run_script: RunScript, crash: Callable[[int], None]
) -> None:
    flags = ["--training.steps=9", "--checkpoint.interval=4", "--ema.post_hoc_interval=3"]
    assert run_script("train.py", *job(tmp_path / "whole", *flags)).code == 0
    crash(6)  # its snapshot is stored and the newest checkpoint is of step 4
    assert run_script("train.py", *job(tmp_path, *flags)).code == 1
    assert list(snapshots_of(tmp_path / "run")) == [3, 6]
    assert run_script("train.py", *job(tmp_path, *flags)).code == 0
    resumed, whole = snapshots_of(tmp_path / "run"), snapshots_of(tmp_path / "whole" / "run")
    assert list(resumed) == list(whole) == [3, 6, 9]
    for step, path in resumed.items():
        verify(path)
        assert_same(read_state(path), read_state(whole[step]))
    last = Path("checkpoint") / "step-00000009"
    assert_same(read_state(tmp_path / "run" / last), read_state(tmp_path / "whole" / "run" / last))


def test_a_resumed_run_replaces_the_snapshots_of_steps_that_it_takes_again(
    tmp_path: Path, run_script: RunScript, crash: Callable[[int], None]
) -> None:
    """Also where its snapshots are now of other steps: those of a folder belong to one sequence of steps."""
    flags = ["--training.steps=8", "--checkpoint.interval=4"]
    crash(7)
    assert run_script("train.py", *job(tmp_path, *flags, "--ema.post_hoc_interval=2")).code == 1
    assert list(snapshots_of(tmp_path / "run")) == [2, 4, 6]
    crash(6)
    assert run_script("train.py", *job(tmp_path, *flags, "--ema.post_hoc_interval=7")).code == 1
    assert list(snapshots_of(tmp_path / "run")) == [2, 4, 6]  # nothing is lost before its successor is stored
    assert run_script("train.py", *job(tmp_path, *flags, "--ema.post_hoc_interval=7")).code == 0
    assert list(snapshots_of(tmp_path / "run")) == [2, 4, 7, 8]


def test_a_rollback_replaces_the_snapshots_behind_it(
    tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    averages: dict[str, list[State]] = {"added": []}
    add_step = PostHocEMA.add_step

    def poison(self: PostHocEMA) -> None:
        add_step(self)
        averages["added"].append({"step": torch.tensor(self.progress.step)})
        if self.progress.step == 5 and self.progress.rollbacks == 0:
            parameter = next(iter(self.averages.parameters.values()))
            parameter.detach().mul_(float("nan"))  # the next step diverges

    monkeypatch.setattr(PostHocEMA, "add_step", poison)
    flags = ["--training.steps=6", "--checkpoint.interval=3", "--ema.post_hoc_interval=4"]
    code, out, err = run_script("train.py", *job(tmp_path, *flags, "--training.on_nonfinite=rollback"))
    assert code == 0, err
    assert "back to step 3" in out
    assert [int(item["step"]) for item in averages["added"]] == [1, 2, 3, 4, 5, 4, 5, 6]
    snapshots = snapshots_of(tmp_path / "run")
    assert list(snapshots) == [4, 6]
    assert all(tensor.isfinite().all() for path in snapshots.values() for tensor in read_state(path).values())
    end = read_state(tmp_path / "run" / "checkpoint" / "step-00000006", "post_hoc_ema.")
    assert_same(end, read_state(snapshots[6], "post_hoc_ema."))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return limit_writes(SnapshotManager, monkeypatch)


def test_a_full_disk_and_pruning_never_lose_a_stored_snapshot(
    tmp_path: Path, run_script: RunScript, full_disk: list[int]
) -> None:
    """A run fails without its last snapshot; the same command then writes it without training."""
    full_disk.extend((4, 7))
    flags = ["--training.steps=7", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=1"]
    flags += ["--ema.post_hoc_interval=2"]
    code, out, err = run_script("train.py", *job(tmp_path, *flags))
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("warning")] == [
        "warning: no snapshot of the averages of step 4: File too large; the last one is step-00000002. "
        "The run continues"
    ]
    reason = read_status(tmp_path / "run")["reason"]
    assert reason.startswith("the last snapshot of the averages could not be written")
    assert err == f"error: {reason}\n"
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run" / "checkpoint")] == [7]
    assert list(snapshots_of(tmp_path / "run")) == [2, 6]
    full_disk.clear()
    code, out, err = run_script("train.py", *job(tmp_path, *flags))
    assert code == 0, err
    assert list(snapshots_of(tmp_path / "run")) == [2, 6, 7]
    for path in snapshots_of(tmp_path / "run").values():
        verify(path)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".partial", ".deleted")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, State]:
    """A run of 40 steps with 10 snapshots, and the average of width 0.075, computed during training."""
    folder = tmp_path_factory.mktemp("trained")
    script = folder / "direct.py"
    script.write_text(DIRECT.format(repository=str(REPOSITORY), folder=str(folder)))
    flags = ["--training.steps=40", "--ema.post_hoc_interval=4", "--checkpoint.interval=100"]
    request.getfixturevalue("run_alone")(script, *job(folder, *flags))
    return folder / "run", torch.load(folder / "direct.pt")


DIRECT = """
import sys
sys.path.insert(0, {repository!r})
sys.argv = ["train.py", *sys.argv[1:]]
import torch
from torchditan.checkpoint.post_hoc_ema import PostHocEMA
from torchditan.commands import train
from torchditan.optim.power_ema import PowerEMA
from torchditan.supervision.exit_status import run_job

construct, add_step, finish = PostHocEMA.__init__, PostHocEMA.add_step, PostHocEMA.finish

def with_direct(self, model, **options):
    construct(self, model, **options)
    self.direct = PowerEMA(model, widths=[0.075])

def add(self):
    add_step(self)
    self.direct.update(self.progress.step)

def save(self):
    finish(self)
    average = self.direct.averages[0]
    torch.save({{name: tensor.clone() for name, tensor in average.items()}}, "{folder}/direct.pt")

PostHocEMA.__init__, PostHocEMA.add_step, PostHocEMA.finish = with_direct, add, save
sys.exit(run_job(train.main))
"""


def test_a_run_gives_a_width_that_was_never_stored_within_a_thousandth(
    trained: tuple[Path, State], tmp_path: Path, run_script: RunScript
) -> None:
    run, direct = trained
    out = tmp_path / "average"
    code, text, err = run_script(*RECONSTRUCT, run, "--width=0.075", f"--out={out}")
    assert code == 0, err
    made = tmp_path / "average_0.075"
    assert f"{made}: average of width 0.075 at step 40, from 20 of 20 stored averages" in text
    stored, read = open_weights(made)
    assert (stored.step, stored.images_seen, stored.weights) == (40, 160, "ema")
    rebuilt = torch.cat([read(name).flatten() for name in direct])
    exact = torch.cat([tensor.flatten() for tensor in direct.values()])
    error = ((rebuilt - exact).norm() / exact.norm()).item()
    print(f"error {error:.1e}")  # pytest -s
    assert error < 1e-3
    raw = read_state(run / "checkpoint" / "step-00000040", "model.")
    distance = torch.cat([raw[f"model.{name}"].flatten() for name in direct])
    assert (distance - exact).norm() / exact.norm() > 20 * error  # the average differs more from the last weights


def test_a_reconstruction_is_a_run_that_can_be_loaded_exported_and_replaced(
    trained: tuple[Path, State], tmp_path: Path, run_script: RunScript
) -> None:
    """The widths are those of two stored averages, which are then the same to the bit."""
    run, _ = trained
    out = tmp_path / "average"
    assert run_script(*RECONSTRUCT, run, "--width", "0.05", "0.1", "--step=36", f"--out={out}").code == 0
    for position, width in enumerate((0.05, 0.1)):
        made = tmp_path / f"average_{width:g}_step_36"
        state = read_state(snapshots_of(run)[36], f"post_hoc_ema.{position}.")
        model = torchditan.load(made, device="cpu")
        assert (model.step, model.weights) == (36, "ema")
        averages = {key.removeprefix(f"post_hoc_ema.{position}."): tensor for key, tensor in state.items()}
        assert_same(saved_weights(model.model), averages)
    assert model.sample(classes=[3], num_steps=2).shape == (1, 1, 8, 8)
    content = read_config(made)["imported"]
    assert {key: content[key] for key in ("ema_width", "step", "run")} == {
        "ema_width": 0.1,
        "step": 36,
        "run": str(run),
    }
    export = run_script("torchditan", "export", made, tmp_path / "weights.safetensors")
    assert export.code == 0, export.err
    back = tmp_path / "back"
    assert run_script("torchditan", "import", tmp_path / "weights.safetensors", back).code == 0
    assert read_config(back)["imported"]["ema_width"] == 0.1
    again = run_script(*RECONSTRUCT, run, "--width=0.1", "--step=36", f"--out={out}")
    assert again.code == 2
    assert_refused(again.err, str(made), ["exists", "--overwrite"])
    assert run_script(*RECONSTRUCT, run, "--width=0.1", "--step=36", f"--out={out}", "--overwrite").code == 0
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    nothing_new = run_script(*RECONSTRUCT, run, "--width", "0.2", "0.1", "--step=36", f"--out={out}")
    assert nothing_new.code == 2 and str(made) in nothing_new.err
    assert not (tmp_path / f"{out.name}_0.2_step_36").exists()
    again = run_script(*RECONSTRUCT, made, "--width=0.1")
    assert again.code == 2
    assert_refused(again.err, f'RUN = "{made}"', ["train.py"])


def test_damaged_snapshots_are_left_out_and_named(
    trained: tuple[Path, State], tmp_path: Path, run_script: RunScript
) -> None:
    run = tmp_path / "damaged"
    shutil.copytree(trained[0], run)
    snapshots = snapshots_of(run)
    for step in (40, 32):
        file = next(snapshots[step].glob("*.distcp"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    code, out, err = run_script(*RECONSTRUCT, run, "--width=0.075")
    assert code == 0, err
    assert f"average of width 0.075 at step 36, from {2 * 8} of {2 * 8} stored averages" in out
    assert all(f"{snapshots[step]} is not used" in err for step in (40, 32))
    refusal = run_script(*RECONSTRUCT, run, "--width=0.075", "--step=40")
    assert refusal.code == 2
    assert_refused(refusal.err, "--step = 40", [str(snapshots[40]), "damaged"])


def test_the_commands_of_the_page_work(tmp_path: Path, run_script: RunScript) -> None:
    """With a smaller model and fewer steps."""
    page = (REPOSITORY / "docs" / "optimizer_and_ema.md").read_text()
    block = page.partition("```\n")[2].partition("\n```")[0]
    small = ["--training.steps=4", "--model.flavor=debugmodel", "--training.global_batch_size=2"]
    small += ["--dataset.num_workers=0", "--metrics.enable_sampling=false", "--validation.freq=0"]
    extra = {
        "train": [*small, "--ema.post_hoc_interval=1"],
        "generate": ["--sampling.num_steps=1", "--sampling.max_classes=1"],
    }
    commands = [line.split() for line in block.splitlines()]
    assert [command[1] for command in commands] == ["train", "average", "generate"]
    for _, name, *arguments in commands:
        code, _, err = run_script("torchditan", name, *arguments, *extra.get(name, []))
        assert code == 0, (name, err)
    assert list((tmp_path / "outputs" / "quickstart_ema_0.075" / "samples").glob("*.png"))


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        (["--width=nan"], "--width = NaN", ["0.2887"]),
        (["--width=0.3"], "--width = 0.3", ["0.2887"]),
        (["--width", "0.1", "0.1"], "--width = [0.1, 0.1]", ["same folder"]),
        (["--width=0.1", "--step=5"], "--step = 5", ["4", "40"]),
        (["--width=0.1", "--steps=5"], "--steps", ["--step?"]),
        ([], "", ["--width"]),
    ],
)
def test_mistakes_of_a_reconstruction_are_one_line(
    flags: list[str], about: str, mentions: list[str], trained: tuple[Path, State], run_script: RunScript
) -> None:
    code, _, err = run_script(*RECONSTRUCT, trained[0], *flags)
    assert code == 2
    assert_refused(err, about, mentions)


def test_a_run_without_stored_averages_is_refused(trained: tuple[Path, State], tmp_path: Path, run_script: RunScript):
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    shutil.rmtree(run / "checkpoint" / "post_hoc_ema")
    code, _, err = run_script(*RECONSTRUCT, run, "--width=0.1")
    assert code == 2
    assert_refused(err, f'RUN = "{run}"', ["snapshot"])
    content = json.loads((run / "config.json").read_bytes())
    content["config"]["ema"]["post_hoc_widths"] = []
    (run / "config.json").write_text(json.dumps(content))
    code, _, err = run_script(*RECONSTRUCT, run, "--width=0.1")
    assert code == 2
    assert_refused(err, f'RUN = "{run}"', ["--ema.post_hoc_widths"])


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        (["--ema.post_hoc_widths=0.05,0.3"], "ema.post_hoc_widths = [0.05, 0.3]", ["0.2887"]),
        (["--ema.post_hoc_widths=0.1,0.1"], "ema.post_hoc_widths = [0.1, 0.1]", ["different"]),
        (["--ema.post_hoc_widths=0"], "ema.post_hoc_widths = [0.0]", ["above 0"]),
        (["--ema.post_hoc_interval=0"], "ema.post_hoc_interval = 0", ["at least 1"]),
        (
            ["--ema.post_hoc_widths=", "--ema.post_hoc_interval=5"],
            "ema.post_hoc_interval = 5",
            ["ema.post_hoc_widths"],
        ),
    ],
)
def test_wrong_options_are_one_line(
    flags: list[str], about: str, mentions: list[str], tmp_path: Path, run_script: RunScript
) -> None:
    code, _, err = run_script("train.py", *job(tmp_path), *flags)
    assert code == 2
    assert_refused(err, about, mentions)
    assert not (tmp_path / "run").exists()


def test_other_widths_do_not_continue_a_run_and_another_interval_does(
    trained: tuple[Path, State], run_script: RunScript
) -> None:
    run, _ = trained
    flags = job(run.parent, "--training.steps=40", "--checkpoint.interval=100")
    code, _, err = run_script("train.py", *flags, "--ema.post_hoc_widths=0.1")
    assert code == 2
    assert_refused(err, str(run), ["ema.post_hoc_widths"])
    assert run_script("train.py", *flags, "--ema.post_hoc_interval=10").code == 0


def test_the_start_of_a_run_says_how_much_disk_space_the_snapshots_take(
    trained: tuple[Path, State], run_script: RunScript
):
    run, direct = trained
    size = 2 * sum(tensor.numel() * tensor.element_size() for tensor in direct.values())
    files = [file.stat().st_size for file in snapshots_of(run)[40].glob("*.distcp")]
    assert size < sum(files) < 1.3 * size  # small tensors have a header of their own
    code, out, _ = run_script("train.py", *job(run.parent, "--training.steps=40", "--ema.post_hoc_interval=4"))
    assert code == 0
    assert f"10 snapshots of {size / 1e9:,.3f} GB, {10 * size / 1e9:,.3f} GB in all, in {run}" in out


KILLED = """
import os, signal, sys
sys.path.insert(0, {repository!r})
sys.argv = ["train.py", *sys.argv[1:]]
from torchditan.commands import train
from torchditan.periodic_tasks import PeriodicTasks
from torchditan.supervision.exit_status import run_job

run_periodic_tasks = PeriodicTasks.run_periodic_tasks

def killed(self, *arguments, **options):
    if self.progress.step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    run_periodic_tasks(self, *arguments, **options)

PeriodicTasks.run_periodic_tasks = killed
sys.exit(run_job(train.main))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("replicate", [1, 2], ids=["FSDP", "DDP"])
def test_killed_ranks_resume_to_the_bit_and_other_ranks_continue(
    replicate: int, tmp_path: Path, run_distributed: RunDistributed, run_script: RunScript
) -> None:
    """SIGKILL on 2 ranks; then 2 ranks continue to the bit, and 4 (HSDP) or 1 within rounding."""
    flags = ["--training.steps=9", "--checkpoint.interval=4", "--ema.post_hoc_interval=3"]
    degree = f"--training.data_parallel_replicate_degree={replicate}"
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(repository=str(REPOSITORY)))
    for name in ("same", "four", "one"):
        assert run_distributed([script, *job(tmp_path / name, *flags, degree)], 2).returncode != 0
        assert list(snapshots_of(tmp_path / name / "run")) == [3, 6]
    assert run_distributed(["train.py", *job(tmp_path / "whole", *flags, degree)], 2).returncode == 0
    assert run_distributed(["train.py", *job(tmp_path / "same", *flags, degree)], 2).returncode == 0
    hybrid = "--training.data_parallel_replicate_degree=2"
    assert run_distributed(["train.py", *job(tmp_path / "four", *flags, hybrid)], 4).returncode == 0
    assert run_script("train.py", *job(tmp_path / "one", *flags)).code == 0
    whole = {step: read_state(path) for step, path in snapshots_of(tmp_path / "whole" / "run").items()}
    assert list(whole) == [3, 6, 9]
    for name in ("same", "four", "one"):
        snapshots = {step: read_state(path) for step, path in snapshots_of(tmp_path / name / "run").items()}
        assert list(snapshots) == [3, 6, 9]
        for step, state in snapshots.items():
            if name == "same":
                assert_same(state, whole[step])
            for key, tensor in state.items():
                torch.testing.assert_close(tensor, whole[step][key], rtol=1e-5, atol=1e-6)


def test_a_lora_is_averaged_alone(tmp_path: Path, run_script: RunScript) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    from torchditan.ablation.grid import as_flags
    from torchditan.finetune.resolutions import published_options

    flags = [*as_flags(published_options("flux/debugmodel", None)), "--dataset.dataset_name=dummy", "--lora.rank=2"]
    flags += ["--training.batch_size=2", "--training.steps=2", "--ema.post_hoc_interval=1", "--optimizer.lr=0.01"]
    common = [flag for flag in job(tmp_path) if not flag.startswith(("--model", "--optimizer", "--training"))]
    result = run_script("train.py", *common, *flags)
    assert result.code == 0, result.err
    run = tmp_path / "run"
    assert run_script(*RECONSTRUCT, run, "--width=0.1").code == 0
    stored = read_state(snapshots_of(run)[2])
    model = torchditan.load(tmp_path / "run_ema_0.1", device="cpu", dtype=torch.float32).model
    weights = saved_weights(model)
    averages = {key.removeprefix("post_hoc_ema.1."): value for key, value in stored.items() if ".1." in key[:15]}
    assert averages and all("lora" in name for name in averages) and len(stored) == 2 * len(averages)
    assert_same({name: weights[name] for name in averages}, averages)
