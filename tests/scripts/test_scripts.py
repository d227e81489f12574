# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""generate and evaluate on a tiny trained run, from another folder; the arguments of the scripts in scripts/."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import cards
import pytest
from PIL import Image
from refusals import assert_refused

from torchditan.config.loader import load_config

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunScript

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RUN = "a run"


@pytest.fixture(scope="module")
def outputs(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, with a checkpoint."""
    folder = tmp_path_factory.mktemp("outputs")
    flags = ["--model.flavor=debugmodel", "--training.steps=3", "--training.batch_size=4", "--dataset.num_workers=0"]
    flags += ["--checkpoint.enable_checkpoint", "--checkpoint.interval=2", "--metrics.enable_sampling=false"]
    flags += ["--sampling.num_steps=2", f"--job.dump_folder={folder}", f"--metrics.experiment_name={RUN}"]
    run_alone("train.py", *flags)
    return folder


Refuse = Callable[..., str]


@pytest.fixture
def refused(outputs: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """`refused("generate", RUN, "--step=7")`: the one line with which a command ends."""
    monkeypatch.chdir(outputs)

    def run(name: str, *arguments: str) -> str:
        code, output, errors = run_script("torchditan", name, *arguments)
        assert (code, output) == (2, "")
        (line,) = errors.splitlines()
        return line

    return run


def test_generate_draws_a_grid_from_the_newest_checkpoint(
    outputs: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(outputs)
    code, output, errors = run_script("torchditan", "generate", RUN)
    assert (code, errors) == (0, "")
    grid = outputs / RUN / "samples" / "generated_00000003_seed0.png"
    timing, where = output.splitlines()
    assert timing.startswith("80 images in ")
    assert where == f"samples, generated next to real: {grid.relative_to(outputs)}"
    assert Image.open(grid).size[1] > 10 * 48, "ten classes"


def test_generate_draws_what_it_was_asked_for(outputs: Path, tmp_path: Path, run_script: RunScript) -> None:
    arguments = [
        str(outputs / RUN),
        "--step=2",
        "--weights=raw",
        "--classes=3,5",
        f"--out={tmp_path / 'x' / 'grid.png'}",
    ]
    arguments += ["--sampling.images_per_class=2", "--sampling.sampler=heun", "--batch_size=3", "--seed=4"]
    code, output, errors = run_script("torchditan", "generate", *arguments)
    assert (code, errors) == (0, "")
    assert output.startswith("4 images in ")
    assert Image.open(tmp_path / "x" / "grid.png").size[1] < 5 * 48, "two classes"


def test_generate_keeps_the_pictures_that_it_drew_before(outputs: Path, run_script: RunScript) -> None:
    folder = outputs / RUN / "samples"
    arguments = ["--seed=7", "--classes=3", "--sampling.images_per_class=1"]
    for guidance in (1, 2, 3):
        outcome = run_script(
            "torchditan", "generate", outputs / RUN, *arguments, f"--sampling.guidance_scale={guidance}"
        )
        assert outcome.code == 0, outcome.err
    names = ["generated_00000003_seed7.png", "generated_00000003_seed7_2.png", "generated_00000003_seed7_3.png"]
    assert sorted(path.name for path in folder.glob("*seed7*")) == names
    assert len({(folder / name).read_bytes() for name in names}) == 3


def test_evaluate_counts_the_classes_that_a_classifier_recognises(outputs: Path, run_script: RunScript) -> None:
    outcome = run_script("torchditan", "evaluate", outputs / RUN, "--samples_per_class=2", "--epochs=4")
    assert outcome.code == 0, outcome.err
    report = cards.values(outcome)
    assert (report["step"], report["num_samples"], report["chance"]) == (3, 20, 0.1)
    assert list(report["per_class"]) == list("0123456789")
    assert 0 <= report["accuracy_generated"] <= 1
    assert report["accuracy_held_out_real"] > 0.5, "the classifier learns the real images"


def test_evaluate_says_how_far_it_is_on_stderr_and_keeps_stdout_for_the_result(
    outputs: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchditan.run import progress

    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    flags = ["--samples_per_class=2", "--epochs=4"]
    code, output, errors = run_script("torchditan", "evaluate", outputs / RUN, *flags)
    assert code == 0 and output.startswith("| figure")
    for what in (f"loading {outputs / RUN}: ", "training the classifier: ", "drawing 20 samples: "):
        assert any(line.startswith(what) for line in errors.splitlines()), what


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["gone"], "gone", ["run directory"]),
        ([], "", ["run"]),
        ([RUN, "--step=7"], "--step = 7", [f"{RUN}/checkpoint", "[2, 3]"]),
        ([RUN, "--step=x"], "--step", ["value"]),
        ([RUN, "--stepp=1"], "--stepp", ["--step?"]),
        ([RUN, "--sampling.num_step=1"], "sampling.num_step", ["sampling.num_steps?"]),
        ([RUN, "--sampling.num_steps=0"], "sampling.num_steps = 0", ["1"]),
        ([RUN, "extra"], "extra", ["--section.key"]),
    ],
)
@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_a_mistake_is_one_line(
    name: str, arguments: list[str], about: str, mentions: list[str], refused: Refuse
) -> None:
    assert_refused(refused(name, *arguments), about, mentions)


@pytest.mark.parametrize(
    ("name", "argument", "about", "mentions"),
    [
        ("generate", "--classes=3,x", 'classes = "x"', ["no class x", "0 to 9"]),
        ("generate", "--classes=3,10", "classes = [3, 10]", ["0 to 9"]),
        ("generate", "--batch_size=0", "--batch_size", ["0", "1"]),
        (
            "generate",
            "--training.steps=3",
            "--training.steps",
            [
                "--help",
                "--step",
                "--weights",
                "--prompts",
                "--classes",
                "--seed",
                "--batch_size",
                "--dtype",
                "--without_lora",
                "--original",
                "--out",
                "--sampling.key",
                "--autoencoder.path",
                "--model.path",
                "--text_encoder.path",
            ],
        ),
        (
            "generate",
            "--guidance_scale=4",
            "--guidance_scale",
            ["--sampling.guidance_scale?"],
        ),
        ("evaluate", "--epochs=few", "--epochs", ["1", "integer"]),
    ],
)
def test_a_value_that_cannot_be_is_one_line(
    name: str, argument: str, about: str, mentions: list[str], refused: Refuse
) -> None:
    assert_refused(refused(name, RUN, argument), about, mentions)


def test_a_run_without_a_checkpoint_says_how_to_get_one(outputs: Path, tmp_path: Path, refused: Refuse) -> None:
    (tmp_path / "config.json").write_bytes((outputs / RUN / "config.json").read_bytes())
    line = refused("generate", str(tmp_path))
    assert_refused(line, f"{tmp_path}/checkpoint", ["checkpoint.save_final = false", "--checkpoint.enable_checkpoint"])


TAKES_A_RUN = [
    ("torchditan", "generate", "{run}"),
    ("torchditan", "evaluate", "{run}"),
    ("torchditan", "export_lora", "{run}", "lora.safetensors"),
    ("torchditan", "export", "{run}", "weights.safetensors"),
    ("optimization_analysis.py", "--compare", "{run}", "{other}"),
]


@pytest.mark.parametrize("command", TAKES_A_RUN, ids=" ".join)
def test_a_path_that_is_no_run_is_one_line_that_names_a_similar_one(
    command: tuple[str, ...], outputs: Path, run_script: RunScript
) -> None:
    run = outputs / RUN
    for path, mention in (
        (run / "config.json", f"{run}?"),
        (run / "metrics.jsonl" / "x", "run directory"),
        (outputs / "a rum", f"{run}?"),
        (outputs, "config.json"),
    ):
        script, *arguments = (word.format(run=path, other=run) for word in command)
        code, out, err = run_script(script, *arguments)
        assert (code, out) == (2, "")
        assert_refused(err, str(path), [mention])


def test_files_of_another_kind_are_named(run_script: RunScript, tmp_path: Path) -> None:
    (tmp_path / "my_jobs").mkdir()
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04" + bytes(60))
    code, _, err = run_script("train.py", "--job.config_file=my_jobs")
    assert code == 2 and 'job.config_file = "my_jobs": is a folder; must be a TOML file' in err
    code, _, err = run_script("train.py", "--dataset.dataset_name=latents", "--dataset.root_dir=model.pt")
    assert code == 2 and "model.pt is a PyTorch file" in err and ".safetensors" in err


def test_a_run_named_without_its_folder_is_found_in_outputs(run_script: RunScript, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "quickstart").mkdir(parents=True)
    (tmp_path / "outputs" / "quickstart" / "config.json").write_text("{}")
    assert run_script("torchditan", "generate", "quickstart").err.endswith("; did you mean outputs/quickstart?\n")


TORCHRUN = """#!/bin/sh
printf "%s\\n" "$@" | tee arguments
echo "[rank0]:autotune: batch 24: 1.0 images/s"
echo "[rank0]:autotune: training.batch_size = 24"
if [ "$STATE" ]; then
  cd "$TORCHDITAN_RANKS_FOLDER"
  echo "{\\"rank\\": 0, \\"state\\": \\"$STATE\\", \\"reason\\": null, \\"time\\": 1}" > rank-00000.json
fi
"""


def launch(
    folder: Path, *arguments: str, script: str = "train_latent_diffusion.sh", code: int = 1, **environment: str
) -> list[str]:
    """What a script makes of it: the arguments of torchrun, which only prints them here, and what the script adds.

    `STATE` is the state that rank 0 reports; without it no rank began, let alone completed.
    """
    torchrun = folder / "bin" / "torchrun"
    torchrun.parent.mkdir(exist_ok=True)
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key not in ("NGPU", "CONFIG_FILE", "LOG_RANK")}
    path = f"{torchrun.parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [str(SCRIPTS / script), *arguments],
        cwd=folder,
        env={**kept, "PATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stderr
    return [line for line in result.stdout.splitlines() if not line.startswith("[rank0]:")]


def test_the_launcher_trains_the_course_projects_job_on_one_gpu(tmp_path: Path) -> None:
    arguments = launch(tmp_path)
    assert "--nproc_per_node=1" in arguments
    assert "--local-ranks-filter=0" in arguments
    assert arguments[-2:] == [str(SCRIPTS.parent / "train.py"), "--job.config_file=llama3_latent_diffusion.toml"]


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("oom", 1), ("interrupted", 75)])
def test_a_run_of_the_course_projects_grids_exits_with_what_they_read_as_out_of_memory(
    tmp_path: Path, state: str, code: int
) -> None:
    script = "train_latent_diffusion_ablate.sh"
    arguments = launch(tmp_path, "--model.patch_size=4", script=script, code=code, STATE=state, NGPU="1")
    assert arguments[-2:] == ["--job.config_file=llama3_latent_diffusion_ablate.toml", "--model.patch_size=4"]
    config = load_config(arguments[-2:])
    assert (config.training.steps, config.dataset.dummy_fill, config.metrics.legacy_tags) == (40, "zeros", True)


def test_the_search_of_the_course_projects_grids_ends_with_the_batch_size(tmp_path: Path) -> None:
    """The grid reads the last number of two lines, and passes the batch of its previous search."""
    script = "autotune_bs_train_latent_diffusion.sh"
    flags = ["--training.batch_size=8"]
    assert launch(tmp_path, *flags, script=script, code=0, STATE="completed", NGPU="1") == [
        "Attempting training with batch size: 24",
        "Binary search complete. Optimal batch size found: 24",
    ]
    given = (tmp_path / "arguments").read_text().splitlines()
    assert given[-3:] == [*flags, "--training.batch_size=auto", "--job.print_config"]
    assert launch(tmp_path, script=script, code=3, STATE="oom", NGPU="1") == []


def test_the_launcher_passes_environment_and_arguments_on(tmp_path: Path) -> None:
    further = ["--training.steps=100", "--job.description", "two words"]
    arguments = launch(tmp_path, *further, NGPU="8", CONFIG_FILE="my jobs/a.toml", LOG_RANK="0,3")
    assert "--nproc_per_node=8" in arguments
    assert "--local-ranks-filter=0,3" in arguments
    assert arguments[-4:] == ["--job.config_file=my jobs/a.toml", *further]
