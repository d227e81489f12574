# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan evaluate` end to end on a tiny run, with an extractor that costs nothing: cards, seeds, files, ranks."""

from __future__ import annotations

import csv
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cards
import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from pixel_quality import NUM_FEATURES, random_images
from refusals import assert_refused

from torchditan.distributed.precision import precision_for
from torchditan.extras.evaluation.card import Card, cards_of_run, read_card
from torchditan.extras.evaluation.sample_batches import image_shape, write_images
from torchditan.registry import METRICS
from torchditan.run.reading import read_config, read_metrics
from torchditan.sampling.sampler import Sampler

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunDistributed, RunScript

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = ("torchditan", "evaluate")
TINY = [
    "--job.config_file=quickstart",
    "--dataset.dataset_name=dummy",
    "--dataset.dummy_size=80",
    "--dataset.num_classes=3",
    "--dataset.image_size=8",
    "--model.input_channels=1",
    "--model.flavor=debugmodel",
    "--training.global_batch_size=16",
    "--training.steps=2",
    "--metrics.enable_sampling=false",
    "--metrics.log_freq=1",
    "--validation.freq=0",
    "--sampling.num_steps=2",
]
FEW = ["--metrics=pixels", "--num_samples=40", "--batch_size=16"]


@pytest.fixture(autouse=True)
def pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--metrics pixels`: the figures of 12 features."""
    monkeypatch.setitem(METRICS, "pixels", "pixel_quality:PixelQuality")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("outputs")
    return train(folder)


def train(folder: Path, *flags: str, code: int = 0) -> Path:
    argv = ["train.py", *TINY, f"--job.dump_folder={folder}", "--metrics.experiment_name=run", *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(REPOSITORY / "train.py"), run_name="__main__")
    if dist.is_initialized():  # after an error
        dist.destroy_process_group()
    assert stop.value.code == code
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, without evaluations."""
    return Path(shutil.copytree(trained, tmp_path / "outputs" / "run"))


Evaluate = Callable[..., tuple[Card, "Outcome"]]


@pytest.fixture
def evaluate(run_script: RunScript, run: Path, tmp_path: Path) -> Evaluate:
    """`card, outcome = evaluate("--seeds=2")`, in the folder `out`."""

    def evaluated(*arguments: object, of: object = run, out: Path = tmp_path / "out") -> tuple[Card, Outcome]:
        given = [] if of is None else [of]
        outcome = run_script(*SCRIPT, *given, *(arguments or FEW), f"--out={out}")
        assert outcome.code == 0, outcome.err
        return read_card(out), outcome

    return evaluated


def refused(run_script: RunScript, *arguments: object) -> str:
    outcome = run_script(*SCRIPT, *arguments)
    assert outcome.code == 2 and outcome.out == "", outcome
    return outcome.err.splitlines()[-1]


def test_a_distance_is_printed_with_recall_coverage_copies_and_an_interval(evaluate: Evaluate, run: Path) -> None:
    card, outcome = evaluate()
    figures = card.figures
    assert {"FD-Pixels", "KID-Pixels", "recall-Pixels", "coverage-Pixels", "held-out FD-Pixels"} <= figures.keys()
    distance = figures["FD-Pixels"]
    assert distance.num_images == 40 and distance.extractor == "Pixels" and distance.value is not None
    assert distance.low is not None and distance.high is not None and distance.low <= distance.value <= distance.high
    assert distance.interval is not None and "sampling only" in distance.interval
    lines = outcome.out.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("| FD-Pixels"))
    following = " ".join(lines[place + 1 : place + 7])
    assert all(name in following for name in ("recall", "coverage", "copies"))
    assert "| 50% interval " in lines[place - 2]
    assert not [line for line in lines if line.startswith(("{", "}", '  "'))], "JSON is in the card"
    assert (card.step, card.num_samples) == (2, 40)
    assert card.run == str(run) and card.reference.num_images == 80 and card.held_out is not None
    stored = read_config(run)
    assert (card.run_id, card.training_commit, card.training_seed) == (stored["run_id"], stored["git_commit"], 0)
    precision = precision_for(torch.device("cpu"))  # of the quickstart's "auto"
    assert (card.training_precision, card.training_versions, card.weights) == (precision, stored["versions"], "ema")


def test_the_command_of_the_card_repeats_the_evaluation_to_the_bit(
    evaluate: Evaluate, run_script: RunScript, tmp_path: Path
) -> None:
    options = [
        "--seed=0",
        "--seeds=2",
        "--class_balance=random",
        "--rounding=down",
        "--weights=raw",
        "--sampling.guidance_scale=3",
    ]
    first, _ = evaluate(*FEW, *options)
    assert first.seeds == [0, 1] and len(set(first.samples)) == 2
    assert all(len(figure.per_seed) == 2 for figure in first.figures.values())
    distance = first.figures["FD-Pixels"]
    assert distance.interval is not None and "95%, 2 seeds" in distance.interval
    second = cards.repeated(tmp_path / "out", run_script)
    assert second.sampling["guidance_scale"] == 3 and second.options["rounding"] == "down" and second.weights == "raw"


def test_several_values_share_one_model_and_one_table_and_finished_rows_are_kept(
    run_script: RunScript, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = ["--sampling.num_steps", "1", "2", "--sampling.guidance_interval", "0,1", "0.2,0.8", *FEW]
    outcome = run_script(*SCRIPT, run, *several)
    assert outcome.code == 0, outcome.err
    (table,) = (run / "evaluation").glob("*/table.csv")
    with open(table) as file:
        rows = list(csv.DictReader(file))
    assert [(row["num_steps"], row["guidance_interval"]) for row in rows] == [
        *(("1", "0,1"), ("1", "0.2,0.8"), ("2", "0,1"), ("2", "0.2,0.8")),
    ]
    found = {(card.sampling["num_steps"], card.sampling["guidance_interval"][0]): card for card in cards_of_run(run)}
    assert len(found) == 4
    for row in rows:
        card = found[int(row["num_steps"]), float(row["guidance_interval"].split(",")[0])]
        figure = card.figures["FD-Pixels"]
        shown = [row["model_evaluations"], row["FD-Pixels"], row["FD-Pixels low"]]
        assert shown == [str(card.model_evaluations), str(figure.value), str(figure.low)]
    printed = [line for line in outcome.out.splitlines() if line.startswith("| ")]
    assert len(printed) == 2 + 4 and "FD-Pixels" in printed[0] and "recall-Pixels" in printed[0]
    with Image.open(table.with_name("plot.png")) as plot:
        assert plot.width > 100
    alone = cards.repeated(next((run / "evaluation").glob("*_euler-2_*")), run_script)
    assert any(alone.samples == card.samples for card in found.values()), "a row is the evaluation of its values"
    monkeypatch.setattr(Sampler, "draw_batch", None)  # nothing is drawn again
    again = run_script(*SCRIPT, run, *several)
    assert again.code == 0 and again.out == outcome.out, again.err


def test_an_evaluation_that_ran_out_of_memory_continues_where_it_stopped(
    evaluate: Evaluate, run_script: RunScript, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = evaluate()
    draw_batch, calls = Sampler.draw_batch, []

    def exhausted(self: Sampler, model: Any, drawing: Any, numbers: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(numbers))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return draw_batch(self, model, drawing, numbers, **kwargs)

    monkeypatch.setattr(Sampler, "draw_batch", exhausted)
    outcome = run_script(*SCRIPT, run, *FEW)
    assert outcome.code == 3
    assert "--batch_size = 16" in outcome.err and "Traceback" not in outcome.err
    (folder,) = (run / "evaluation").iterdir()
    assert not (folder / "card.json").exists()
    outcome = run_script(*SCRIPT, run, *FEW)
    assert outcome.code == 0 and calls == [16, 16, 16, 8], "the first batch was kept"
    card = read_card(folder)
    assert card.figures == whole.figures and card.samples == whole.samples
    assert sorted(path.name for path in folder.iterdir()) == ["card.json", "card.md"]


def test_saved_images_are_evaluated_like_the_run_that_drew_them(evaluate: Evaluate, tmp_path: Path) -> None:
    drawn, _ = evaluate(*FEW, "--save_images")
    images = tmp_path / "out" / "samples.npz"
    assert image_shape(images) == (40, 8, 8)
    card, _ = evaluate("--metrics=pixels", f"--images={images}", out=tmp_path / "of_file")
    assert card.images is not None and card.step is None
    # The samples of a run are sorted by class; their sums differ in the last digits.
    for name in ("FD-Pixels", "recall-Pixels", "copies: distance-Pixels"):
        assert card.figures[name].value == pytest.approx(drawn.figures[name].value, rel=1e-6), name


def test_two_files_are_compared_without_a_run(evaluate: Evaluate, run_script: RunScript, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("ours.npz", "theirs.npz")]
    for seed, file in enumerate(files):
        write_images(file, [random_images(60, seed=seed)], shape=(60, 8, 8))
    arguments = ["--metrics=pixels", f"--images={files[0]}", f"--reference={files[1]}"]
    card, outcome = evaluate(*arguments, of=None)
    assert card.run is None and card.reference.path == str(files[1]) and card.figures["FD-Pixels"].num_images == 60
    assert "copies" in outcome.out and "not measured" in outcome.out
    same, _ = evaluate("--metrics=pixels", f"--images={files[0]}", f"--reference={files[0]}", of=None)
    assert same.figures["FD-Pixels"].value == pytest.approx(0, abs=1e-6)
    assert cards.repeated(tmp_path / "out", run_script).figures == same.figures


def test_a_run_whose_data_is_gone_is_compared_with_a_file(
    evaluate: Evaluate, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchditan.errors import ConfigError

    def gone(*args: Any, **kwargs: Any) -> None:
        raise ConfigError("dataset.root_dir: does not exist")

    reference = tmp_path / "reference.npz"
    write_images(reference, [random_images(60, seed=1)], shape=(60, 8, 8))
    from torchditan.extras.weights import trained_model

    monkeypatch.setattr(trained_model, "build_dataset", gone)
    card, outcome = evaluate(*FEW, "--class_balance=balanced", f"--reference={reference}")
    assert card.held_out is None and "dataset.root_dir" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["--metrics", "effent"], '--metrics = "effent"', ["effnet?"]),
        (["--num_samples=5"], "--num_samples", ["5", str(NUM_FEATURES + 1)]),
        (["--images={gone}"], "{gone}", ["arr_0"]),
        (["--images={larger}"], "training images", ["8 x 8", "16 x 16"]),
        (["--reference={larger}"], "{larger}", ["16 x 16", "8 x 8"]),
        (["--reference={of_inception}"], "{of_inception}", ["Inception-2015"]),
        (["--metrics=inception", "--inception_weights={larger}"], "{larger}", ["SHA-256"]),
        (["--images={larger}", "--num_samples=40"], "--num_samples", ["--images"]),
        (["--without_data"], "--without_data", ["--reference"]),
        (
            ["--without_data", "--reference={same_size}", "--metrics=classifier", "--class_balance=random"],
            "metric classifier",
            ["training images"],
        ),
        (["--sampling.num_steps", "2", "x"], 'sampling.num_steps = "x"', ["integer"]),
        (["--without_run"], "", ["run", "outputs/quickstart"]),
        (["--without_run", "--images={same_size}"], "--reference", ["--images"]),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_drawn(
    run_script: RunScript,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    about: str,
    mentions: list[str],
) -> None:
    monkeypatch.setattr(Sampler, "draw_batch", None)
    names = {"gone": tmp_path / "gone.npz", "larger": tmp_path / "16px.npz", "of_inception": tmp_path / "stats.npz"}
    write_images(names["larger"], [random_images(60, seed=1, size=16)], shape=(60, 16, 16))
    names["same_size"] = tmp_path / "8px.npz"
    write_images(names["same_size"], [random_images(60, seed=1)], shape=(60, 8, 8))
    np.savez(names["of_inception"], mu=np.zeros(2048), sigma=np.eye(2048))
    given = [argument.format_map(names) for argument in arguments]
    if not any(argument.startswith("--metrics") for argument in given):
        given.append("--metrics=pixels")
    if "--without_run" in given:
        given.remove("--without_run")
    else:
        given.insert(0, str(run))
    line = refused(run_script, *given)
    assert "pickle" not in line
    assert_refused(line, about.format_map(names), mentions)
    assert not (run / "evaluation").exists()


def test_few_training_images_give_copies_kid_and_precision_of_as_many_samples(
    run_script: RunScript, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "effnet", "pixel_quality:WidePixelQuality")
    outcome = run_script(*SCRIPT, run)
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.err.splitlines() if "too few" in line]
    assert line.startswith("80 samples for ") and "80 training images" in line and "1,280" in line
    found = cards.values(outcome)
    assert "accuracy_generated" not in found
    assert {"KID-Pixels", "precision-Pixels", "copies: distance-Pixels"} <= found.keys()
    assert found["FD-Pixels"].startswith("not computed: 80 training images are too few")
    assert f"FD-Pixels: {found['FD-Pixels']}\n" in outcome.out


def test_default_metrics_leave_out_what_cannot_be_computed(
    run_script: RunScript, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchditan.extras.evaluation import evaluation_run

    monkeypatch.setattr(evaluation_run, "NUM_FEATURES", 50)  # then 80 training images are enough
    outcome = run_script(*SCRIPT, run, "--num_samples=20", "--epochs=1")
    assert outcome.code == 0, outcome.err
    assert "without effnet" in outcome.err and "more than 50 samples" in outcome.err
    assert "accuracy_generated" in cards.values(outcome)
    monkeypatch.setattr(evaluation_run, "PACKAGE", "no_such_package")
    outcome = run_script(*SCRIPT, run, "--epochs=1", "--num_samples=60")
    assert "without effnet" in outcome.err and "[evaluation]" in outcome.err


ON_RANKS = """
import runpy, sys
from torchditan.sampling.sampler import Sampler
from torchditan.registry import METRICS
METRICS["pixels"] = "pixel_quality:PixelQuality"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ranks_draw_the_same_bytes_and_find_the_same_figures_at_several_values(
    evaluate: Evaluate, run_distributed: RunDistributed, run: Path, tmp_path: Path
) -> None:
    alone, _ = evaluate()
    script = tmp_path / "on_ranks.py"
    script.write_text(ON_RANKS)
    several = ["--sampling.num_steps", "2", "1", f"--out={tmp_path / 'on_2'}"]
    result = run_distributed([script, REPOSITORY / "torchditan/__main__.py", "evaluate", run, *FEW, *several], 2)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "on_2" / "table.csv").is_file()
    card, other = (read_card(next((tmp_path / "on_2").glob(f"*_euler-{steps}_*"))) for steps in (2, 1))
    assert (card.ranks, card.samples) == (2, alone.samples) and other.samples != card.samples
    assert card.figures == alone.figures and card.reference == alone.reference


def test_an_evaluation_during_training_changes_no_step_and_equals_the_scripts(
    evaluate: Evaluate, run: Path, tmp_path: Path
) -> None:
    flags = ["--evaluation.freq=1", "--evaluation.num_samples=40", "--evaluation.metrics=pixels"]
    flags += ["--metrics.sample_batch_size=16"]
    records, plain = read_metrics(train(tmp_path / "evaluated", *flags)), read_metrics(run)
    assert [record["loss"] for record in records] == [record["loss"] for record in plain]
    assert all("FD-Pixels" in record and record["evaluation_s"] > 0 for record in records)
    # The trainer draws in its own precision, the script in float32.
    in_float32 = train(tmp_path / "float32", *flags, "--training.mixed_precision_param=float32")
    records, (card, _) = read_metrics(in_float32), evaluate(of=in_float32)
    for name, figure in card.figures.items():
        assert records[-1][name] == pytest.approx(figure.value), name


def test_too_few_samples_of_an_evaluation_during_training_are_refused_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, "--evaluation.freq=1", "--evaluation.num_samples=5", "--evaluation.metrics=pixels", code=2)
    line = capsys.readouterr().err.strip().splitlines()[-1].removeprefix("error: ")
    assert_refused(line, "evaluation.num_samples", ["5", str(NUM_FEATURES + 1)])
    assert not run.exists()


FAILING_ONCE = """
import os, pixel_quality
def fail(self):
    pixel_quality.PixelQuality.compute = compute
    os.kill(os.getpid(), 9)
compute = pixel_quality.PixelQuality.compute
pixel_quality.PixelQuality.compute = fail
"""


def test_an_evaluation_of_two_ranks_that_did_not_finish_is_repeated_by_the_same_command(
    run_distributed: RunDistributed, tmp_path: Path
) -> None:
    flags = ["--evaluation.freq=2", "--evaluation.num_samples=40", "--evaluation.metrics=pixels"]
    flags += ["--training.mixed_precision_param=float32", "--validation.freq=2", "--metrics.enable_tensorboard"]
    flags += ["--job.dump_folder=.", "--metrics.experiment_name=run"]
    outcomes, records = [], []
    for name, script in (("failing", FAILING_ONCE + ON_RANKS), ("again", ON_RANKS)):
        (tmp_path / name).write_text(script)
        command = [tmp_path / name, REPOSITORY / "train.py", *TINY, *flags]
        outcomes.append(run_distributed([*command], 2, cwd=tmp_path))
        records.append(read_metrics(tmp_path / "run"))
    assert outcomes[0].returncode != 0 and outcomes[1].returncode == 0, outcomes[1].stderr
    assert "step 2 lacks its evaluation" in outcomes[1].stdout
    assert [record["step"] for record in records[0]] == [1, 2] and "FD-Pixels" not in records[0][-1]
    last = records[1][-1]
    assert records[1] == [records[0][0], {**last, **records[0][-1]}] and last["validation_loss"] > 0
    assert {"FD-Pixels", "KID-Pixels", "recall-Pixels", "evaluation_s"} <= last.keys()
