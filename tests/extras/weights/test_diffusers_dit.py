# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""diffusers' DiTTransformer2DModel and DiTPipeline, imported and exported: both compute what our model computes.

All weights are random and different, so that an exchange of two of them shows.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from refusals import assert_refused, refused
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers")

import diffusers
from random_dit import NUM_CLASSES, ddim, random_pipeline, random_transformer

from torchditan.checkpoint.weights import Weights as Converted
from torchditan.config.loader import from_dict, to_dict
from torchditan.config.options import flatten
from torchditan.diffusion.noise_schedules import spaced_levels
from torchditan.diffusion.objectives import build_objective
from torchditan.diffusion.samplers import guided_prediction
from torchditan.errors import ConfigError
from torchditan.extras.weights.diffusers_export import export_to_diffusers
from torchditan.extras.weights.formats.diffusers_dit import convert
from torchditan.extras.weights.formats.foreign_files import read_foreign_weights
from torchditan.extras.weights.importing import import_weights
from torchditan.extras.weights.opening import open_model
from torchditan.extras.weights.trained_model import TrainedModel, stored_spec
from torchditan.models.dit import NORM_EPS

if TYPE_CHECKING:
    pass

WEIGHTS = "diffusion_pytorch_model.safetensors"
STATED = {"noise_schedule": "linear", "prediction": "epsilon"}
LEVELS = torch.tensor([0, 1, 250, 500, 998, 999])
LABELS = torch.tensor([0, 3, 9, 10, 5, 6])
NULL = NUM_CLASSES
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "scaled_linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with ten classes, which tests only read."""
    folder = tmp_path_factory.mktemp("made") / "pipeline"
    random_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def imported(pipeline: Path) -> Path:
    """A run of it, which tests only read."""
    run = pipeline.parent / "run"
    import_weights(pipeline, run, format="diffusers")
    return run


@pytest.fixture
def copied(pipeline: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pipeline, tmp_path / "copied")


def read(folder: Path, **given: str) -> Converted:
    return convert(read_foreign_weights(folder), **given)


def options_of(converted: Converted) -> dict[str, Any]:
    return flatten(from_dict(converted.config or {}))


def build(converted: Converted) -> torch.nn.Module:
    with torch.device("meta"):
        model = stored_spec(from_dict(converted.config or {})).build()
    model.load_state_dict(converted.tensors(), assign=True)
    return model.eval().requires_grad_(False)


def difference(theirs: Any, ours: torch.nn.Module, *, null: int = NULL) -> float:
    """The largest one over levels, labels and values."""
    x = torch.randn(len(LEVELS), 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(x, LEVELS, LABELS.where(LABELS < NULL, null)).sample
        found = ours(x, LEVELS / 1000, {"class_label": LABELS})  # the time of the paper: 0 is data
    assert expected.std() > 0.1
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("options", [{}, {"out_channels": 4}, {"norm_eps": 1e-6}, {"num_layers": 2, "patch_size": 4}])
def test_an_imported_transformer_predicts_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = random_transformer(**options)
    theirs.save_pretrained(tmp_path)
    assert difference(theirs, build(read(tmp_path, **STATED))) < 1e-5


@pytest.mark.parametrize("options", [{"safe_serialization": False}, {"max_shard_size": "100KB"}])
def test_pickles_and_shards_have_the_same_weights(options: dict[str, Any], pipeline: Path, tmp_path: Path) -> None:
    model = diffusers.DiTTransformer2DModel.from_pretrained(pipeline / "transformer")
    model.save_pretrained(tmp_path, **options)
    assert not (tmp_path / WEIGHTS).exists()
    assert_same(read(tmp_path, **STATED).tensors(), read(pipeline).tensors())


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (ddim(), ("linear", "epsilon", "leading")),
        (ddim(timestep_spacing="trailing", prediction_type="v_prediction"), ("linear", "v", "trailing")),
        (ddim(**SCHEDULES["cosine"], prediction_type="sample"), ("cosine", "x", "leading")),
        (diffusers.DDPMScheduler(**SCHEDULES["scaled_linear"]), ("scaled_linear", "epsilon", "leading")),
        (diffusers.DPMSolverMultistepScheduler(), ("linear", "epsilon", "linspace")),
    ],
)
def test_the_scheduler_determines_the_convention(scheduler: Any, expected: tuple[str, str, str], copied: Path) -> None:
    scheduler.save_pretrained(copied / "scheduler")
    options = options_of(read(copied))
    names = ("diffusion.noise_schedule", "diffusion.prediction", "sampling.spacing")
    assert tuple(options[name] for name in names) == expected


def test_files_of_2023_have_an_older_class_and_fewer_keys(copied: Path) -> None:
    new = read(copied)
    edit(copied / "transformer/config.json", {"_class_name": "Transformer2DModel", "num_vector_embeds": None})
    scheduler = copied / "scheduler/scheduler_config.json"
    kept = ("_class_name", "beta_start", "beta_end", "beta_schedule", "clip_sample", "prediction_type")
    scheduler.write_text(json.dumps({key: json.loads(scheduler.read_text())[key] for key in kept}))
    old = read(copied)
    assert (old.config, old.notes) == (new.config, new.notes)


def edit(file: Path, changed: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


CONFIG, SCHEDULER, VAE = "transformer/config.json", "scheduler/scheduler_config.json", "vae/config.json"


@pytest.mark.parametrize(
    ("file", "changed", "mentions"),
    [
        (CONFIG, {"_class_name": "PixArtTransformer2DModel"}, ["PixArtTransformer2DModel", "DiTTransformer2DModel"]),
        (CONFIG, {"norm_type": "ada_norm_single"}, ["norm_type", "ada_norm_zero"]),
        (CONFIG, {"patch_size": 3, "sample_size": 2048}, ["sample_size", "512"]),
        (CONFIG, {"sample_size": "32"}, ["is not a checkpoint of diffusers"]),
        (SCHEDULER, {"beta_end": 0.03}, ["beta_end 0.03", "squaredcos_cap_v2"]),
        (SCHEDULER, {"prediction_type": "flow_prediction"}, ["prediction_type flow_prediction"]),
        (SCHEDULER, {"rescale_betas_zero_snr": True}, ["rescale_betas_zero_snr", "False"]),
        (VAE, {"_class_name": "VQModel"}, ["VQModel", "AutoencoderKL"]),
    ],
)
def test_another_architecture_or_convention_is_refused(
    file: str, changed: dict[str, Any], mentions: list[str], copied: Path, tmp_path: Path
) -> None:
    edit(copied / file, changed)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        import_weights(copied, tmp_path / "run", format="diffusers")
    assert "\n" not in str(caught.value) and str(copied) in str(caught.value)
    assert [word for word in mentions if word not in str(caught.value)] == []
    assert sorted(tmp_path.rglob("*")) == before


def test_different_embedders_are_refused(pipeline: Path) -> None:
    source = read_foreign_weights(pipeline)
    name = "transformer_blocks.2.norm1.emb.timestep_embedder.linear_2.bias"
    changed = source.with_tensors({**source.tensors(), name: source.tensor(name) + 1e-6})
    with pytest.raises(ConfigError, match=r"transformer_blocks\.0\..*linear_2.bias .* must be equal"):
        convert(changed)


@pytest.mark.parametrize("given", [{}, {"prediction": "epsilon"}, {"noise_schedule": "linear"}])
def test_a_transformer_without_scheduler_has_no_known_convention(given: dict[str, str], pipeline: Path) -> None:
    option = "--prediction" if "noise_schedule" in given else "--noise_schedule"
    with refused(f"{option} = none", "scheduler/scheduler_config.json"):
        read(pipeline / "transformer", **given)
    options = options_of(read(pipeline / "transformer", noise_schedule="cosine", prediction="v"))
    assert (options["diffusion.noise_schedule"], options["diffusion.prediction"]) == ("cosine", "v")
    with refused('--prediction = "v"', "epsilon"):
        read(pipeline, prediction="v")


def test_the_autoencoder_normalises_as_in_the_pipeline(copied: Path) -> None:
    edit(copied / VAE, {"shift_factor": 0.1})  # which DiTPipeline does not read
    options = options_of(read(copied))
    assert (options["autoencoder.shift"], options["autoencoder.scale"]) == ([0.0], [0.5])


def test_another_autoencoder_may_replace_that_of_the_pipeline(copied: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(copied / "vae", tmp_path / "elsewhere")
    (copied / "vae" / WEIGHTS).rename(copied / "vae/diffusion_pytorch_model.bin")
    import_weights(copied, tmp_path / "latents", format="diffusers")  # its autoencoder is opened when it is used
    with refused(f'autoencoder.path = "{copied}/vae"', WEIGHTS):
        TrainedModel.open(tmp_path / "latents", device="cpu").open_decoder()
    flags = ["--autoencoder.name=diffusers", f"--autoencoder.path={elsewhere}"]
    assert (
        import_weights(copied, tmp_path / "run", format="diffusers", flags=flags).checked_config().autoencoder.scale
        == [0.5] * 4
    )


def pictures(run: Path, labels: list[int], noise: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """Our sampler and our decoder, from this noise; in [0, 1] as those of diffusers."""
    trained = TrainedModel.open(run, device="cpu")
    options = trained.config.replace({f"sampling.{key}": value for key, value in sampling.items()}).sampling
    predict = guided_prediction(
        trained.model,
        conditioning=trained.spec.conditioning,
        cond={"class_label": torch.tensor(labels)},
        guidance_scale=options.guidance_scale,
        guidance_channels=trained.sample_shape[0],
    )
    objective: Any = build_objective(trained.config.diffusion, trained.spec)
    with torch.no_grad():
        samples = objective.sample(predict, noise, sampling=options, step_noise=lambda step: torch.zeros_like(noise))
    return (trained.to_pixels(samples) / 2 + 0.5).clamp(0, 1)


@pytest.mark.parametrize(
    ("schedule", "prediction", "spacing"),
    [("linear", "epsilon", "leading"), ("scaled_linear", "v_prediction", "trailing"), ("cosine", "sample", "trailing")],
)
def test_the_exported_pipeline_draws_our_pictures(schedule: str, prediction: str, spacing: str, tmp_path: Path) -> None:
    scheduler = ddim(**SCHEDULES[schedule], prediction_type=prediction, timestep_spacing=spacing)
    random_pipeline(scheduler).save_pretrained(tmp_path / "theirs")
    import_weights(tmp_path / "theirs", tmp_path / "run", format="diffusers")
    exported = export_to_diffusers(open_model(tmp_path / "run"), tmp_path / "out", dtype=torch.float32)
    assert (exported.left_out, exported.notes) == (None, ())
    pipe = eval(f"diffusers.{exported.how_to_open}")
    pipe.set_progress_bar_config(disable=True)

    def drawn(guidance_scale: float = 4.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 10, "output_type": "pt", "guidance_scale": guidance_scale}
        return pipe([3, 7], generator=generator, **options).images

    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    ours = pictures(tmp_path / "run", [3, 7], noise, num_steps=10)
    assert ours.std() > 0.1
    assert (drawn() - ours).abs().max() < 1e-4
    assert (drawn(guidance_scale=2.0) - ours).abs().max() > 1e-3
    other = "trailing" if spacing == "leading" else "leading"
    assert (pictures(tmp_path / "run", [3, 7], noise, num_steps=10, spacing=other) - ours).abs().max() > 1e-3


@pytest.mark.parametrize(("spacing", "steps"), [("leading", (2, 3, 7, 30, 50, 300)), ("trailing", (1, 2, 10, 50, 250))])
def test_the_exported_scheduler_steps_through_our_levels(
    spacing: Literal["leading", "trailing"], steps: tuple[int, ...]
) -> None:
    scheduler = ddim(timestep_spacing=spacing)
    for num_steps in steps:
        scheduler.set_timesteps(num_steps)
        levels = scheduler.timesteps.tolist()
        assert levels == spaced_levels(spacing, num_steps)[::-1]
        assert [level - 1000 // num_steps for level in levels[:-1]] == levels[1:]  # what `step` computes


def test_the_exported_transformer_predicts_the_same_with_null_class_1000(imported: Path, tmp_path: Path) -> None:
    export_to_diffusers(open_model(imported), tmp_path / "out", dtype=torch.float32)
    theirs = diffusers.DiTPipeline.from_pretrained(tmp_path / "out").transformer
    trained = TrainedModel.open(imported, device="cpu")
    assert theirs.config.norm_eps == NORM_EPS
    assert difference(theirs, trained.model, null=1000) < 1e-5
    assert difference(theirs, trained.model, null=NULL) > 1e-3
    table = theirs.transformer_blocks[2].norm1.emb.class_embedder.embedding_table.weight
    assert table.shape == (1001, 64) and not table[NULL:1000].any()


def test_the_exported_pipeline_knows_the_names_of_the_classes(imported: Path, tmp_path: Path) -> None:
    run = shutil.copytree(imported, tmp_path / "run")
    edit(run / "config.json", {"class_names": [f"kind {label}" for label in range(NULL)]})
    export_to_diffusers(open_model(run), tmp_path / "out", dtype=torch.float32)
    assert diffusers.DiTPipeline.from_pretrained(tmp_path / "out").get_label_ids(["kind 3"]) == [3]


def test_export_then_import_gives_the_same_tensors(imported: Path, tmp_path: Path) -> None:
    export_to_diffusers(open_model(imported), tmp_path / "out", dtype=torch.float32)
    import_weights(tmp_path / "out", tmp_path / "again", format="diffusers")
    first, again = (TrainedModel.open(run, device="cpu") for run in (imported, tmp_path / "again"))
    assert again.num_classes == NULL
    assert_same(again.model.state_dict(), first.model.state_dict())
    sections = [{**to_dict(trained.config), "metrics": None} for trained in (first, again)]
    for section in sections:
        section["autoencoder"] = {**section["autoencoder"], "path": None}
    assert sections[0] == sections[1]
    export_to_diffusers(open_model(tmp_path / "again"), tmp_path / "twice", dtype=torch.bfloat16)
    halves = load_file(tmp_path / "twice/transformer" / WEIGHTS)
    expected = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "out/transformer" / WEIGHTS).items()}
    assert_same(halves, expected)


@pytest.mark.parametrize(
    ("changed", "mentions"),
    [
        ({"model.conditioning": "in_context"}, ["model.conditioning adaln (in_context here)"]),
        ({"model.norm_type": "rmsnorm"}, ["model.norm_type np_layernorm (rmsnorm here)"]),
        ({"model.timestep_frequencies": "dit"}, ["model.timestep_frequencies diffusers (dit here)"]),
        ({"diffusion.objective": "flow_matching"}, ["diffusion.objective ddpm (flow_matching here)"]),
        ({"model.sample_size": [8, 12]}, ["square samples (8 x 12 here)"]),
        ({"dataset.num_classes": 1001}, ["at most 1000 classes (1001 here)"]),
        (
            {"model.text": "in_context", "model.text_tokens": 4, "model.text_width": 8},
            ["model.text none (in_context here)"],
        ),
    ],
)
def test_other_options_are_refused_with_the_right_value(
    changed: dict[str, Any], mentions: list[str], imported: Path, tmp_path: Path
) -> None:
    weights = open_model(imported)
    assert weights.config is not None
    config = to_dict(from_dict(weights.config).replace(changed))
    with pytest.raises(ConfigError) as caught:
        export_to_diffusers(replace(weights, config=config), tmp_path / "out", dtype=torch.float32)
    assert_refused(str(caught.value), '--format = "diffusers"', ["DiTPipeline", "torchditan"])
    assert [text for text in mentions if text not in str(caught.value)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"shift": [0.1]}, "shift [0.1"),
        ({"scale": [0.5, 0.5, 0.5, 0.6]}, "only one factor"),
        ({"name": "haar"}, "is haar"),
        ({"path": "missing"}, "missing is not on this machine"),
        ({"fingerprint": "diffusers-0"}, "diffusers-0"),
    ],
)
def test_another_decoder_leaves_the_transformer_alone(
    changed: dict[str, Any], why: str, imported: Path, tmp_path: Path
) -> None:
    weights = open_model(imported)
    assert weights.config is not None
    config = from_dict(weights.config).replace({f"autoencoder.{key}": value for key, value in changed.items()})
    out = tmp_path / "out"
    exported = export_to_diffusers(replace(weights, config=to_dict(config)), out, dtype=torch.float32)
    assert exported.left_out is not None and why in exported.left_out
    assert sorted(path.name for path in out.iterdir()) == ["config.json", WEIGHTS, "scheduler", "torchditan.json"]
    assert_same(read(out).tensors(), read_tensors(imported))


def read_tensors(run: Path) -> dict[str, torch.Tensor]:
    return TrainedModel.open(run, device="cpu").model.state_dict()


def test_a_model_without_classes_has_an_empty_label_table(copied: Path, tmp_path: Path) -> None:
    edit(copied / CONFIG, {"num_embeds_ada_norm": 1000})
    tensors = load_file(copied / "transformer" / WEIGHTS)
    tables = {name: torch.zeros(1001, 64) for name in tensors if name.endswith("embedding_table.weight")}
    save_file({**tensors, **tables}, copied / "transformer" / WEIGHTS)
    (copied / "torchditan.json").write_text('{"num_classes": 0}')
    import_weights(copied, tmp_path / "run", format="diffusers")
    trained = TrainedModel.open(tmp_path / "run", device="cpu")
    assert trained.num_classes == 0 and not hasattr(trained.model, "y_embedder")
    export_to_diffusers(open_model(tmp_path / "run"), tmp_path / "out", dtype=torch.float32)
    assert_same(load_file(tmp_path / "out/transformer" / WEIGHTS), {**tensors, **tables})


def test_an_ancestral_run_says_that_the_pipeline_samples_otherwise(imported: Path, tmp_path: Path) -> None:
    weights = open_model(imported)
    assert weights.config is not None
    changed = {"sampling.sampler": "ancestral", "sampling.spacing": "linspace", "sampling.guidance_channels": 3}
    config = to_dict(from_dict(weights.config).replace(changed))
    exported = export_to_diffusers(replace(weights, config=config), tmp_path / "out", dtype=torch.float32)
    assert [all(option in note for option in changed) for note in exported.notes] == [True]
    scheduler = json.loads((tmp_path / "out" / SCHEDULER).read_text())
    assert (scheduler["_class_name"], scheduler["timestep_spacing"]) == ("DDIMScheduler", "trailing")


def test_a_full_disk_leaves_no_folder(imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchditan.extras.weights.diffusers_export.write_weights", fail)
    with refused(str(tmp_path / "out"), "No space left on device"):
        export_to_diffusers(open_model(imported), tmp_path / "out", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []
