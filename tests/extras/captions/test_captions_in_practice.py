# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Captions of real data: several per image, too long, in any script; prompts in files, and negative ones."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cards
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers")
pytest.importorskip("wordllama")

import tiny_pipelines
import tiny_runs
import zoo as zoo_of_runs
from refusals import assert_refused, refused

from torchditan.config.loader import load_config
from torchditan.config.options import Config
from torchditan.config.rules import missing_for_effect
from torchditan.datasets import build_dataset
from torchditan.distributed.process_group import Rank
from torchditan.extras.captions.dataset import CachedCaptions, encode_prompts, open_captions
from torchditan.extras.captions.encode import find_text_encoder
from torchditan.extras.captions.tokens import describe_tokens
from torchditan.extras.evaluation.card import read_card
from torchditan.extras.evaluation.evaluator import Evaluator
from torchditan.extras.evaluation.metric import MetricOfAllPictures
from torchditan.extras.report.stored_grids import read_cells
from torchditan.extras.weights.trained_model import load
from torchditan.models.spec import TensorSpec, TextEmbeddings
from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript
    from tests.zoo import Zoo

ALONE = Rank(0, 0, 1)


def write(root: Path, captions: dict[str, dict[str, Any]]) -> Path:
    """Images of 8 x 8 in one colour each, and a metadata.jsonl with these columns."""
    root.mkdir(exist_ok=True)
    lines = []
    for number, (name, columns) in enumerate(captions.items()):
        Image.new("RGB", (8, 8), (60 * number % 256, 0, 90)).save(root / name)
        lines.append(json.dumps({"file_name": name, **columns}))
    (root / "metadata.jsonl").write_text("\n".join(lines))
    return root


def flags_for(data: Path) -> list[str]:
    place = [f"--dataset.root_dir={data}", f"--cache.folder={data.parent / 'cache'}"]
    return ["--dataset.dataset_name=captions", "--dataset.image_size=8", "--model.text=in_context", *place]


def opened(config: Config) -> CachedCaptions:
    source: Any = build_dataset(config.dataset, split="train", input_channels=3)
    return open_captions(config, source, None, rank=ALONE)[0]


def test_the_stream_draws_captions_by_weight_from_seed_and_position(tmp_path: Path) -> None:
    texts = ["a dog", "a brown dog", "snow"]
    several, one = {"text": texts, "weights": [6, 3, 1]}, {"text": "a cat"}
    config = load_config(flags_for(write(tmp_path / "data", {"a.png": several, "b.png": one})))
    dataset = opened(config)
    stored = {text: dataset.embed(text)["prompt_embeds"] for text in (*texts, "a cat")}

    def drawn(index: int, position: int, seed: int = 0) -> str:
        found = dataset.vary(dataset[index], index, seed=seed, position=position)["prompt_embeds"]
        return next(text for text, embeds in stored.items() if torch.equal(embeds, found))

    first = [drawn(0, position) for position in range(1000)]
    counts = Counter(first)
    assert [counts[text] / 1000 for text in texts] == pytest.approx([0.6, 0.3, 0.1], abs=0.05)
    assert [drawn(0, position) for position in range(50)] == first[:50]
    assert [drawn(0, position, seed=1) for position in range(50)] != first[:50]
    assert torch.equal(dataset[0]["prompt_embeds"], stored["a dog"])  # validation reads the first
    assert {drawn(1, position) for position in range(9)} == {"a cat"}


def test_other_captions_or_weights_are_other_data(tmp_path: Path) -> None:
    def fingerprint(**columns: Any) -> str | None:
        data = write(tmp_path / "data", {"a.png": columns})
        return opened(load_config(flags_for(data))).fingerprint

    both = fingerprint(text=["a", "b"])
    assert both == fingerprint(text=["a", "b"], weights=[2, 2])
    assert len({both, fingerprint(text=["a", "b"], weights=[2, 1]), fingerprint(text=["a"])}) == 3
    assert fingerprint(text=["a"]) == fingerprint(text="a")


def test_the_captions_of_a_grid_are_spread_over_the_images(tmp_path: Path) -> None:
    kinds = ("circle", "house", "square", "tree")
    captions = {f"{kind}_{number}.png": {"text": f"{kind} {number % 2}"} for kind in kinds for number in range(3)}
    dataset = opened(load_config(flags_for(write(tmp_path / "data", captions))))
    assert dataset.prompts.names == ["circle 0", "house 0", "square 0", "tree 0"]


def tokenizer_of(tmp_path: Path, *flags: str) -> Any:
    return find_text_encoder(load_config(list(flags)), memory=tmp_path).open_tokenizer()


def save_t5(tmp_path: Path) -> str:
    torch.manual_seed(0)
    tiny_pipelines.t5(16).save_pretrained(tmp_path / "t5")
    tiny_pipelines.t5_tokenizer().save_pretrained(tmp_path / "t5")
    return f"--text_encoder.path={tmp_path / 't5'}"


def test_captions_that_are_cut_or_unknown_are_counted(tmp_path: Path) -> None:
    wordllama = tokenizer_of(tmp_path, "--text_encoder.max_length=4")
    texts = {"a dog", "a red dog", "a red dog in snow", "a red dog in deep snow", "🐶🔥"}
    assert describe_tokens(texts, wordllama, what="captions") == (
        'text encoder: 3 of 5 captions cut to 4 tokens (the longest has 10): "a red dog in deep snow"; '
        '1 of 5 captions without a known token: "🐶🔥"; 33.3% of the tokens of captions unknown'
    )
    assert describe_tokens({"a red dog", ""}, wordllama, what="captions") is None
    t5 = tokenizer_of(tmp_path, save_t5(tmp_path), "--text_encoder.max_length=6")
    line = describe_tokens({"a ball", "一只狗", "a red ball and a ball"}, t5, what="prompts")
    assert line is not None and "of 3 prompts cut to 6 tokens" in line
    assert '1 of 3 prompts without a known token: "一只狗"' in line


def test_the_line_is_the_same_with_a_full_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "data", {"a.png": {"text": "a red dog in deep snow"}, "b.png": {"text": "a dog"}})
    config = load_config([*flags_for(data), "--text_encoder.max_length=4"])
    lines = []
    for _ in range(2):
        opened(config)
        lines.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("text encoder")])
    assert lines[0] == lines[1] and "1 of 2 captions cut" in lines[0][0]
    encode_prompts(config, ["a very long prompt"])
    assert "1 of 2 prompts cut" in capsys.readouterr().err


def test_a_negative_prompt_replaces_the_null_condition_of_sampling_alone(
    zoo: Zoo, tmp_path: Path, run_script: RunScript
) -> None:
    plain, negative = zoo("captions"), tmp_path / "negative"
    flags = [flag.format(inputs=plain.parent / "inputs") for flag in zoo_of_runs.JOBS["captions"]]
    flags += ["--sampling.negative_prompt=a green square", f"--cache.folder={tmp_path / 'cache'}"]
    outcome = run_script("train.py", *tiny_runs.job(negative, *tiny_runs.KEEP, *flags))
    assert outcome.code == 0, outcome.err
    curves = [[record["loss"] for record in read_metrics(run)] for run in (plain, negative)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)

    options = {"cache.folder": tmp_path / "cache"}
    trained = load(plain, weights="raw", device="cpu", options=options)

    def draw(**options: Any) -> torch.Tensor:
        return trained.sample(prompts="a red square", seed=1, **options).int()

    unguided = draw(guidance_scale=1.0)
    assert torch.equal(unguided, draw(guidance_scale=1.0, negative_prompt="a blue square"))
    assert torch.equal(draw(guidance_scale=40.0), draw(guidance_scale=40.0, negative_prompt=""))
    assert not torch.equal(draw(guidance_scale=40.0), draw(guidance_scale=40.0, negative_prompt="a blue square"))
    itself = draw(guidance_scale=4.0, negative_prompt="a red square")  # both predictions are the same
    assert (itself - unguided).abs().max() <= 1
    own = load(negative, weights="raw", device="cpu").sample(prompts="a red square", seed=1, guidance_scale=40.0).int()
    assert (own - draw(guidance_scale=40.0, negative_prompt="a green square")).abs().max() <= 1


def test_a_negative_prompt_keeps_what_does_not_depend_on_the_caption() -> None:
    """A published model's first frame stays in the null condition."""
    tensors = {"prompt_embeds": TensorSpec((2, 3)), "condition": TensorSpec((4,))}
    empty = TextEmbeddings(tensors, kept=frozenset(["condition"]), null_tensors={"prompt_embeds": torch.zeros(2, 3)})
    cond = {"prompt_embeds": torch.rand(5, 2, 3), "condition": torch.rand(5, 4)}
    null = empty.with_null({"prompt_embeds": torch.ones(2, 3)}).null(cond)
    assert torch.equal(null["prompt_embeds"], torch.ones(5, 2, 3)) and torch.equal(null["condition"], cond["condition"])


def test_a_negative_prompt_without_effect_is_refused_or_named() -> None:
    option, given = "sampling.negative_prompt", "--sampling.negative_prompt=blurred"
    with refused(f'{option} = "blurred"', "model.text"):
        load_config([given])
    with refused(f'{option} = "blurred"', "imf"):
        load_config([given, "--model.text=in_context", "--diffusion.objective=imf guidance=true"])
    config = load_config([given, "--model.text=in_context", "--sampling.guidance_scale=1"])
    assert "guidance_scale" in str(missing_for_effect(config, option))
    assert missing_for_effect(config.replace({"sampling.guidance_scale": 2.0}), option) is None


def test_grids_keep_their_prompts_and_noise_over_steps_and_a_resume(tmp_path: Path, run_script: RunScript) -> None:
    """Weights that do not change draw the same pictures."""
    captions = {f"{i}.png": {"text": f"a ball, number {i}"} for i in range(4)}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\ufeff# two\n\n一只猫\r\n  @a red ball \n", encoding="utf-8")
    flags = [*flags_for(write(tmp_path / "data", captions)), "--optimizer.lr=0", "--metrics.sample_freq=1"]
    flags += ["--metrics.enable_sampling=true", "--sampling.num_steps=2", "--sampling.images_per_class=2"]
    flags += ["--dataset.held_out=2"]

    def train(name: str, *more: str) -> None:
        outcome = run_script("torchditan", "train", *tiny_runs.job(tmp_path / name, *tiny_runs.KEEP, *flags, *more))
        assert outcome.code == 0, outcome.err

    def grids(name: str) -> list[tuple[torch.Tensor, list[str]]]:
        return [read_cells(path) for path in sorted((tmp_path / name / "samples").glob("step_*.png"))]

    train("captions", "--training.steps=1")
    train("captions", "--training.steps=2")
    train("file", "--training.steps=2", "--sampling.prompts", f"@{prompts}")
    for name in ("captions", "file"):
        (first, labels), (cells, found) = grids(name)
        assert torch.equal(first, cells) and labels == found and not torch.equal(first[0, 0], first[0, 1])
    assert labels == ["一只猫", "@a red ball"] == read_config(tmp_path / "file")["config"]["sampling"]["prompts"]
    text = (tmp_path / "file/samples/step_00000002.labels.txt").read_text(encoding="utf-8")
    assert text == "row 1: 一只猫\nrow 2: @a red ball\n"
    assert not list((tmp_path / "captions/samples").glob("*.txt"))
    prompts.write_text("another")
    drawn = run_script("torchditan", "generate", tmp_path / "captions", "--prompts", f"@{prompts}", "a blue ball")
    assert drawn.code == 0 and "samples: " in drawn.out, drawn.err
    _, labels = read_cells(next((tmp_path / "captions/samples").glob("generated*.png")))
    assert labels == ["another", "a blue ball"]


def test_a_script_prints_any_text_in_a_locale_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchditan.supervision import exit_status

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(exit_status, "die_with_launcher", lambda: None)
    assert exit_status.run_job(lambda: print("a собака", flush=True)) == 0
    assert written.getvalue() == rb"a \u0441\u043e\u0431\u0430\u043a\u0430" + b"\n"


class Means(MetricOfAllPictures):
    """The mean of each source."""

    def compute(self) -> dict[str, Any]:
        return {source: float(self.images(source).mean()) for source in ("train", "held_out", "generated")}


@pytest.mark.parametrize("negative", ["", "a wall"])
def test_a_run_on_captions_is_compared_with_its_images(negative: str, tmp_path: Path, run_script: RunScript) -> None:
    """The command evaluates the same samples as the training did, whose guidance moves away from the same text."""
    captions = {f"{i}.png": {"text": f"ball {i}, red, small, round, flat, old"} for i in range(4)}
    flags = [*flags_for(write(tmp_path / "data", captions)), "--training.steps=6", "--dataset.held_out=1"]
    flags += ["--optimizer.lr=1e-2", "--sampling.guidance_scale=3", "--sampling.num_steps=2"]
    flags += ["--dataset.shuffle_tags=1", f"--sampling.negative_prompt={negative}"]
    flags += ["--training.mixed_precision_param=float32"]
    in_training = ["--evaluation.freq=3", f"--evaluation.metrics={__name__}:Means", "--evaluation.num_samples=7"]
    run = tmp_path / "run"
    trained = run_script("torchditan", "train", *tiny_runs.job(run, *tiny_runs.KEEP, *flags, *in_training))
    assert trained.code == 0, trained.err
    measured = [record for record in read_metrics(run) if "generated" in record]
    assert [record["step"] for record in measured] == [3, 6]

    metric = f"--metrics={__name__}:Means"
    evaluated = run_script("torchditan", "evaluate", run, metric, "--num_samples=7", "--out=card")
    assert evaluated.code == 0, evaluated.err
    card = read_card("card")
    assert card.reference is not None and card.held_out is not None and "class_balance" not in card.options
    assert (card.reference.num_images, card.held_out.num_images) == (3, 1)
    for name in ("train", "held_out", "generated"):
        assert card.figures[name].value == pytest.approx(measured[-1][name]), name
    cards.repeated(Path("card"), run_script)


@pytest.mark.parametrize(
    ("flags", "mentions"),
    [
        (["--autoencoder.path=somewhere"], "pixels of one size"),
        (["--dataset.aspect_buckets", "--dataset.image_size=32"], "pixels of one size"),
        (["--dataset.dataset_name=dummy", "--model.text_tokens=4", "--model.text_width=8"], "has none; must be 0"),
        (["--model.name=flux", "--model.text=none", "--text_encoder.path=x"], "evaluates no published models"),
    ],
)
def test_an_evaluation_in_training_needs_pictures_to_compare(
    flags: list[str], mentions: str, tmp_path: Path, run_script: RunScript
) -> None:
    data = write(tmp_path / "data", {f"{i}.png": {"text": f"ball {i}"} for i in range(4)})
    given = [*flags_for(data), "--dataset.held_out=1", *flags, "--evaluation.freq=3"]
    outcome = run_script("torchditan", "train", *tiny_runs.job(tmp_path / "run", *given))
    assert outcome.code == 2
    assert_refused(outcome.err, "evaluation.freq = 3", [mentions])


def test_prompts_of_an_evaluation_are_all_captions_before_one_occurs_again(tmp_path: Path) -> None:
    captions = {f"{i}.png": {"text": f"ball {i}"} for i in range(4)}
    config = load_config([*flags_for(write(tmp_path / "data", captions)), "--dataset.held_out=0"])
    dataset = build_dataset(config.dataset, split="train", input_channels=3)
    given: dict[str, Any] = {"num_samples": 6, "image_size": (8, 8), "class_names": [], "seed": 0}
    given |= {"decode": lambda samples: samples, "device": ALONE.device}
    evaluator = Evaluator(None, [f"{__name__}:Means"], {"train": dataset}, prompts_of="captions", **given)

    prompts = evaluator.prompts()
    assert sorted(prompts[:4]) == [f"ball {i}" for i in range(4)] and set(prompts[4:]) < set(prompts[:4])
    assert evaluator.prompts(["mine"]) == ["mine"]
