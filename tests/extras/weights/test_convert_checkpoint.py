# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The commands `export` and `import`, and checkpoint.initial_load_path: weights to one file and back, on any ranks.

Run as a script under torchrun (`main`), this file writes a large checkpoint without training.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cards
import pytest
import torch
from refusals import assert_refused, refused
from safetensors.torch import load_file, save_file
from torch import nn

from torchditan.checkpoint.loading import read_state
from torchditan.checkpoint.safetensors_files import TensorToWrite, write_weights
from torchditan.config.loader import to_dict
from torchditan.config.options import Config, Model
from torchditan.errors import ConfigError
from torchditan.extras.weights.initial import load_initial_weights
from torchditan.extras.weights.opening import open_weights
from torchditan.run.reading import read_config

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunDistributed, RunScript

REPOSITORY = Path(__file__).resolve().parents[3]
TINY = [
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=4",
    "--metrics.enable_sampling=false",
    "--sampling.num_steps=2",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=2",
]
FSDP = ["--training.data_parallel_replicate_degree=1", "--training.data_parallel_shard_degree=2"]
AT_REST = ["--training.steps=1", "--optimizer.lr=0"]  # a step that changes nothing shows what a run began with

Weights = dict[str, torch.Tensor]


def job(run: Path, *flags: str) -> list[str]:
    return [*TINY, *flags, f"--job.dump_folder={run.parent}", f"--metrics.experiment_name={run.name}"]


@pytest.fixture(scope="module")
def trained(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps in one process; checkpoints of steps 2 and 3, with averaged and raw weights."""
    run = tmp_path_factory.mktemp("trained") / "run"
    run_alone("train.py", *job(run, "--training.steps=3", "--optimizer.lr=1e-3"), cwd=run.parent)
    return run


@pytest.fixture(scope="module")
def exported(trained: Path, run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The averaged weights of that run's last step."""
    file = tmp_path_factory.mktemp("exported") / "weights.safetensors"
    run_alone("torchditan", "export", trained, file)
    return file


Convert = Callable[..., str]


@pytest.fixture
def convert(run_script: RunScript) -> Convert:
    """`convert("export", run, file)`: the command in this process; what it printed."""

    def run(*arguments: object) -> str:
        outcome = run_script("torchditan", *arguments)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out

    return run


def weights_in(run: Path, *, step: int, key: str) -> Weights:
    """What a checkpoint has, read by another way than the export's."""
    state = read_state(run / "checkpoint" / f"step-{step:08d}", f"{key}.")
    return {name.removeprefix(f"{key}."): tensor for name, tensor in state.items()}


def assert_bitwise(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    assert len(left) > 10
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


def tensor_bytes(file: Path) -> bytes:
    """All of a safetensors file but its header."""
    data = file.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def test_an_export_has_the_weights_to_the_bit(trained: Path, exported: Path, convert: Convert, tmp_path: Path) -> None:
    ema, raw = (weights_in(trained, step=3, key=key) for key in ("ema", "model"))
    assert not torch.equal(ema["blocks.0.attn.qkv.weight"], raw["blocks.0.attn.qkv.weight"])
    assert_bitwise(load_file(exported), ema)
    convert("export", trained, tmp_path / "raw.safetensors", "--weights=raw")
    assert_bitwise(load_file(tmp_path / "raw.safetensors"), raw)


def test_an_export_is_of_the_step_that_was_asked_for(trained: Path, convert: Convert, tmp_path: Path) -> None:
    line = convert("export", trained, tmp_path / "a.safetensors", "--step=2")
    assert line.startswith(f"{tmp_path}/a.safetensors: ema weights of {trained}, step 2, float32, 1.1 MB in ")
    convert("export", trained / "checkpoint" / "step-00000002", tmp_path / "b.safetensors")
    assert_bitwise(load_file(tmp_path / "a.safetensors"), weights_in(trained, step=2, key="ema"))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_bfloat16_export_is_rounded_to_nearest(trained: Path, convert: Convert, tmp_path: Path) -> None:
    convert("export", trained, tmp_path / "half.safetensors", "--dtype=bfloat16")
    rounded = {name: tensor.bfloat16() for name, tensor in weights_in(trained, step=3, key="ema").items()}
    assert_bitwise(load_file(tmp_path / "half.safetensors"), rounded)


def test_the_metadata_say_where_the_weights_come_from(trained: Path, exported: Path) -> None:
    stored = open_weights(exported)
    assert (stored.step, stored.images_seen, stored.kind) == (3, 12, "ema")
    assert stored.config == read_config(trained)["config"]
    assert stored.git_commit == read_config(trained)["git_commit"]
    assert stored.shapes["blocks.0.attn.qkv.weight"] == (192, 64)


@pytest.mark.slow
def test_any_sharding_exports_and_begins_with_the_same_weights(
    trained: Path, exported: Path, convert: Convert, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    two, sources = tmp_path / "two", [exported, trained, tmp_path / "two", tmp_path / "two/checkpoint/step-00000002"]
    runs = [tmp_path / f"begun_{number}" for number in range(len(sources))]
    jobs = [job(two, *FSDP, "--training.steps=3", "--optimizer.lr=1e-3")]
    jobs += [
        job(run, *FSDP, *AT_REST, f"--checkpoint.initial_load_path={source}")
        for run, source in zip(runs, sources, strict=True)
    ]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], 2)
    assert result.returncode == 0, result.stderr
    of_one, of_two = (weights_in(run, step=3, key="ema") for run in (trained, two))
    expected = [of_one, of_one, of_two, weights_in(two, step=2, key="ema")]
    for run, weights in zip(runs, expected, strict=True):
        assert_bitwise(weights_in(run, step=1, key="model"), weights)
        assert_bitwise(weights_in(run, step=1, key="ema"), weights)
    for key, kind in (("ema", "ema"), ("model", "raw")):
        convert("export", two, tmp_path / f"{kind}.safetensors", f"--weights={kind}")
        assert_bitwise(load_file(tmp_path / f"{kind}.safetensors"), weights_in(two, step=3, key=key))
    convert("export", runs[0], tmp_path / "again.safetensors")
    assert tensor_bytes(tmp_path / "again.safetensors") == tensor_bytes(exported)


@pytest.mark.parametrize("source", ["file", "bfloat16", "without metadata", "run", "checkpoint"])
def test_a_run_begins_with_given_weights(
    source: str, trained: Path, exported: Path, tmp_path: Path, run_script: RunScript
) -> None:
    expected = weights_in(trained, step=3, key="ema")
    path, said = exported, "step 3 (ema)"
    if source == "bfloat16":
        path = tmp_path / "half.safetensors"
        assert run_script("torchditan", "export", trained, path, "--dtype=bfloat16").code == 0
        expected = {name: tensor.bfloat16().float() for name, tensor in expected.items()}
    elif source == "without metadata":
        path, said = tmp_path / "plain.safetensors", ""
        save_file(expected, path)
    elif source == "run":
        path = trained
    elif source == "checkpoint":
        path, said = trained / "checkpoint" / "step-00000002", "step 2 (ema)"
        expected = weights_in(trained, step=2, key="ema")
    flags = ["--checkpoint.initial_load_convention=torchditan"] if source == "without metadata" else []
    flags = [*AT_REST, *flags, f"--checkpoint.initial_load_path={path}"]
    outcome = run_script("train.py", *job(tmp_path / "new", *flags))
    assert outcome.code == 0, outcome.err
    stated = read_config(tmp_path / "new")["config"]["checkpoint"]["initial_load_convention"]
    assert stated == ("torchditan" if source == "without metadata" else None)
    assert f"started from the {', '.join([f'weights of {path}', *filter(None, [said])])}\n" in outcome.out
    assert_bitwise(weights_in(tmp_path / "new", step=1, key="model"), expected)
    assert_bitwise(weights_in(tmp_path / "new", step=1, key="ema"), expected)


def test_weights_of_unknown_convention_are_refused_unless_it_is_stated(
    exported: Path, tmp_path: Path, run_script: RunScript
) -> None:
    path, option = tmp_path / "plain.safetensors", "checkpoint.initial_load_convention"
    save_file(load_file(exported), path)
    flags = [*AT_REST, f"--checkpoint.initial_load_path={path}"]
    outcome = run_script("train.py", *job(tmp_path / "new", *flags))
    assert outcome.code == 2 and not (tmp_path / "new").exists()
    (line,) = outcome.err.splitlines()
    assert line.startswith(f'error: checkpoint.initial_load_path = "{path}": ')
    for word in (f"--{option} torchditan", "t = 1 is data", "data - noise", "SiT", "REPA", "DDPM"):
        assert word in line
    outcome = run_script("train.py", *job(tmp_path / "new", *flags, f"--{option}=sit"))
    assert (outcome.code, outcome.err) == (2, f'error: {option} = "sit": must be torchditan\n')
    outcome = run_script("train.py", *job(tmp_path / "new", f"--{option}=torchditan"))
    assert outcome.code == 2 and outcome.err.startswith(
        f'error: {option} = "torchditan": needs checkpoint.initial_load_path'
    )
    outcome = run_script("torchditan", "import", path, tmp_path / "new")
    assert outcome.code == 2 and "torchditan export" in outcome.err and "checkpoint.initial_load_path" in outcome.err


def test_published_weights_of_unknown_convention_are_sent_to_model_path(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, path)
    with pytest.raises(ConfigError, match=r"--model\.path"):
        load_initial_weights(nn.Linear(2, 2), str(path), config=Config(model=Model(name="flux")))


@pytest.mark.parametrize("name", ["weights.pt", "weights.ckpt", "old.pt"])
def test_a_pickle_is_named_with_what_to_do(name: str, tmp_path: Path, run_script: RunScript) -> None:
    path = tmp_path / name
    torch.save({"weight": torch.ones(2)}, path, _use_new_zipfile_serialization=name != "old.pt")
    outcome = run_script("train.py", *job(tmp_path / "new", f"--checkpoint.initial_load_path={path}"))
    assert outcome.code == 2
    mentions = ["pickle", "torchditan import", "--format", "dit", "lightningdit"]
    assert_refused(outcome.err, f'checkpoint.initial_load_path = "{path}"', mentions)
    outcome = run_script("torchditan", "import", path, tmp_path / "new")
    assert outcome.code == 2
    assert_refused(outcome.err, str(path), ["PyTorch file", "--format", "dit", "sit"])
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_weights_of_a_run_without_an_average_are_the_raw_ones(
    tmp_path: Path, run_script: RunScript, convert: Convert
) -> None:
    run, out = tmp_path / "run", tmp_path / "weights.safetensors"
    assert run_script("train.py", *job(run, "--training.steps=1", "--ema.enable=false")).code == 0
    assert ": raw weights of " in convert("export", run, out)
    assert_bitwise(load_file(out), weights_in(run, step=1, key="model"))
    outcome = run_script("torchditan", "export", run, tmp_path / "ema.safetensors", "--weights=ema")
    assert outcome.code == 2
    assert_refused(outcome.err, '--weights = "ema"', [str(run), "raw"])
    begun = job(tmp_path / "new", *AT_REST, f"--checkpoint.initial_load_path={run}")
    assert f"weights of {run}, step 1 (raw)" in run_script("train.py", *begun).out


def test_what_differs_without_another_shape_is_said(exported: Path, tmp_path: Path, run_script: RunScript) -> None:
    flags = [*AT_REST, "--model.timestep_frequencies=diffusers", f"--checkpoint.initial_load_path={exported}"]
    outcome = run_script("train.py", *job(tmp_path / "new", *flags))
    assert outcome.code == 0, outcome.err
    assert (
        f"weights of {exported}, step 3 (ema); model.timestep_frequencies is dit there and diffusers here\n"
        in outcome.out
    )


def test_an_imported_run_draws_the_same_pictures(
    trained: Path, exported: Path, tmp_path: Path, run_script: RunScript, convert: Convert
) -> None:
    run = tmp_path / "run"  # the pictures say the name of their run
    assert convert("import", exported, run) == f"{run}: ema weights of step 3, for torchditan generate and evaluate\n"
    assert_bitwise(load_file(run / "checkpoint/step-00000003.safetensors"), load_file(exported))
    pictures = []
    for folder in (trained, run):
        picture = tmp_path / f"{folder.parent.name}.png"
        outcome = run_script("torchditan", "generate", folder, "--classes=1,2", f"--out={picture}", "--seed=5")
        assert outcome.code == 0, outcome.err
        pictures.append(picture.read_bytes())
    assert pictures[0] == pictures[1]
    outcome = run_script("torchditan", "evaluate", run, "--num_samples=10", "--epochs=1")
    assert (outcome.code, cards.values(outcome)["step"]) == (0, 3)


@pytest.mark.parametrize("flags", [[], ["--weights=raw"], ["--dtype=bfloat16"]])
def test_an_imported_run_exports_the_file_again(
    flags: list[str], trained: Path, tmp_path: Path, convert: Convert
) -> None:
    first, run, second = tmp_path / "first.safetensors", tmp_path / "run", tmp_path / "second.safetensors"
    convert("export", trained, first, *flags)
    convert("import", first, run)
    convert("export", run, second, *(flag for flag in flags if "dtype" in flag))
    assert tensor_bytes(first) == tensor_bytes(second)
    there, again = open_weights(first), open_weights(second)
    assert (again.step, again.images_seen, again.kind) == (there.step, there.images_seen, there.kind)
    assert there.config is not None
    assert again.config == {**there.config, "ema": {**there.config["ema"], "enable": there.kind == "ema"}}
    assert again.git_commit == there.git_commit


def test_an_imported_run_names_the_data_of_this_machine(exported: Path, tmp_path: Path, convert: Convert) -> None:
    convert("import", exported, tmp_path / "run", "--dataset.root_dir=/data/here")
    assert read_config(tmp_path / "run")["config"]["dataset"]["root_dir"] == "/data/here"


def test_an_imported_run_is_not_continued(exported: Path, tmp_path: Path, run_script: RunScript) -> None:
    run = tmp_path / "run"
    assert run_script("torchditan", "import", exported, run).code == 0
    before = sorted(path.name for path in run.rglob("*"))
    outcome = run_script("train.py", *job(run, "--training.steps=5", "--optimizer.lr=1e-3"))
    assert outcome.code == 2
    suggestions = ["--checkpoint.initial_load_path", "--metrics.experiment_name"]
    assert_refused(outcome.err, "training.steps = 5", [str(run), *suggestions])
    assert sorted(path.name for path in run.rglob("*")) == before


def test_only_an_imported_run_is_replaced(trained: Path, exported: Path, tmp_path: Path, run_script: RunScript) -> None:
    run = tmp_path / "run"
    run.mkdir()  # an empty folder is as good as none
    assert run_script("torchditan", "import", exported, run).code == 0
    first = read_config(run)["run_id"]
    outcome = run_script("torchditan", "import", exported, run)
    assert (outcome.code, read_config(run)["run_id"]) == (2, first)
    assert_refused(outcome.err, str(run), ["exists"])
    assert run_script("torchditan", "import", exported, run, "--overwrite").code == 0
    assert read_config(run)["run_id"] != first
    outcome = run_script("torchditan", "import", exported, trained, "--overwrite")
    assert outcome.code == 2
    assert_refused(outcome.err, str(trained))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_import_that_fills_the_disk_is_one_line_and_leaves_nothing(
    exported: Path, tmp_path: Path, run_script: RunScript
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        outcome = run_script("torchditan", "import", exported, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.code == 2
    assert_refused(outcome.err, "new", ["File too large"])
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced_unasked(trained: Path, tmp_path: Path, run_script: RunScript) -> None:
    out = tmp_path / "a.safetensors"
    out.write_text("mine")
    outcome = run_script("torchditan", "export", trained, out)
    assert (outcome.code, outcome.out, out.read_text()) == (2, "", "mine")
    assert_refused(outcome.err, str(out), ["--overwrite"])
    assert run_script("torchditan", "export", trained, out, "--overwrite").code == 0
    assert len(load_file(out)) > 10


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.safetensors"
    path.write_text("before")
    whole = TensorToWrite("a", (2, 3), torch.float32, lambda: torch.ones(2, 3))
    with pytest.raises(OSError, match="No space left"):
        write_weights(path, [whole, TensorToWrite("b", (), torch.float32, fail)], {})
    assert (path.read_text(), [file.name for file in tmp_path.iterdir()]) == ("before", ["a.safetensors"])


def test_a_file_takes_tensors_of_any_layout(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "a part": torch.arange(10.0)[2:5],
        'a "name" of ünusual letters': torch.tensor([1e-45, -0.0, float("inf")]),
    }
    entries = [
        TensorToWrite(name, tuple(tensor.shape), dtype, lambda tensor=tensor: tensor)
        for (name, tensor), dtype in zip(tensors.items(), [torch.float32, torch.bfloat16] * 3, strict=False)
    ]
    write_weights(tmp_path / "a.safetensors", reversed(entries), {"key": "válue"})
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for entry in entries:
        assert found[entry.name].dtype == entry.dtype
        assert torch.equal(found[entry.name], tensors[entry.name].to(entry.dtype)), entry.name


def with_header(header: Any, num_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def place(start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4], "data_offsets": [start, end]}


NO_FILE = ["safetensors", "truncated", "export it again"]


@pytest.mark.parametrize(
    ("data", "mentions"),
    [
        (b"", NO_FILE),
        (b"GGUF" + bytes(60), ["GGUF", "quantized", ".safetensors", "floating-point"]),
        (struct.pack("<Q", 2**63) + b"{}", NO_FILE),
        (with_header(b"[" * 100_000, 0), NO_FILE),
        (with_header({"a": place(0, 16)}, 15), NO_FILE),
        (with_header({"a": place(0, 16), "b": place(8, 24)}, 24), NO_FILE),
        (with_header({"a": place(-16, 0)}, 16), NO_FILE),
        (with_header({"a": place(1 << 40, (1 << 40) + 16)}, 16), NO_FILE),
        (with_header({"a": place(0, 16, "I32")}, 16), ["a", "I32", "floating-point"]),
    ],
    ids=["empty", "GGUF", "endless header", "deep header", "cut short", "overlap", "negative", "outside", "integers"],
)
def test_a_file_that_is_none_is_refused(
    data: bytes, mentions: list[str], tmp_path: Path, run_script: RunScript
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    outcome = run_script("torchditan", "import", path, tmp_path / "run")
    assert (outcome.code, outcome.out) == (2, "")
    assert_refused(outcome.err, str(path), mentions)
    with refused(f'checkpoint.initial_load_path = "{path}"', *mentions):
        load_initial_weights(nn.Linear(2, 2), str(path), config=Config())
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def change(metadata: dict[str, str], **config: Any) -> dict[str, str]:
    """Metadata with options of their configuration changed: `change(metadata, checkpoint={"folder": "x"})`."""
    tree = json.loads(metadata["config"])
    return {**metadata, "config": json.dumps({**tree, **{name: {**tree[name], **config[name]} for name in config}})}


WITHOUT = ["configuration", "torchditan export", "checkpoint.initial_load_path"]
SENSELESS = ["invalid metadata", "export it again"]


@pytest.mark.parametrize(
    ("forge", "mentions"),
    [
        (lambda m: {}, WITHOUT),
        (lambda m: {"format": "pt"}, WITHOUT),
        (lambda m: {**m, "version": "2"}, ["version 2", "newer TorchDiTan", "version 1"]),
        (lambda m: {**m, "step": "one"}, SENSELESS),
        (lambda m: {**m, "weights": "all"}, SENSELESS),
        (lambda m: {**m, "config": "[" * 100_000}, SENSELESS),
        (lambda m: {**m, "config": '{"model": 1}'}, SENSELESS),
        (
            lambda m: change(m, checkpoint={"folder": "../../x"}),
            ['checkpoint.folder = "../../x"', "inside the run directory"],
        ),
        (lambda m: change(m, model={"flavour": "x"}), ["model.flavour", "model.flavor?"]),
        (lambda m: change(m, model={"patch_size": 0}), ["model.patch_size = 0", "at least 1"]),
        (lambda m: change(m, dataset={"image_size": None}), ["image size", "classes", "channels"]),
        (lambda m: change(m, model={"sample_size": None}), ["image size", "classes", "channels"]),
        (
            lambda m: change(m, dataset={"num_classes": 9}),
            ["another model", "y_embedder.embedding_table.weight is (11, 64) there and (10, 64) here"],
        ),
    ],
)
def test_what_a_file_says_of_itself_is_not_believed(
    forge: Callable[[dict[str, str]], dict[str, str]],
    mentions: list[str],
    exported: Path,
    tmp_path: Path,
    run_script: RunScript,
) -> None:
    from safetensors import safe_open

    with safe_open(exported, framework="pt") as file:
        metadata = file.metadata()
    path = tmp_path / "a.safetensors"
    save_file(load_file(exported), path, metadata=forge(metadata))
    outcome = run_script("torchditan", "import", path, tmp_path / "run")
    assert outcome.code == 2
    assert_refused(outcome.err, str(path), mentions)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


BIG = "blocks.0.adaLN_modulation.1"


@pytest.mark.parametrize(
    ("flags", "differing"),
    [
        (
            ["--model.patch_size=4"],
            [
                "model.patch_size is 2 there and 4 here",
                "x_embedder.proj.weight is (64, 1, 2, 2) there and (64, 1, 4, 4) here",
                "final_layer.linear.weight is (4, 64) there and (16, 64) here",
                "final_layer.linear.bias is (4,) there and (16,) here",
            ],
        ),
        (
            ["--model.mlp=gelu", "--ema.enable=false"],
            [
                "model.mlp is None there and gelu here",
                "blocks.0.mlp.fc1.weight is absent there and (256, 64) here",
                "blocks.0.mlp.fc1.bias is absent there and (256,) here",
                "blocks.0.mlp.fc2.weight is absent there and (64, 256) here",
                "21 more",
            ],
        ),
    ],
)
@pytest.mark.parametrize("kind", ["file", "run"])
def test_weights_of_another_model_are_refused(
    kind: str,
    flags: list[str],
    differing: list[str],
    trained: Path,
    exported: Path,
    tmp_path: Path,
    run_script: RunScript,
) -> None:
    path = {"file": exported, "run": trained}[kind]
    outcome = run_script("train.py", *job(tmp_path / "new", *flags, f"--checkpoint.initial_load_path={path}"))
    where = [] if kind == "file" else [f"{trained}/checkpoint/step-00000003"]
    assert_refused(outcome.err, f'checkpoint.initial_load_path = "{path}"', [*where, "another model", *differing])
    assert (outcome.code, list(tmp_path.iterdir())) == (2, [])


def test_a_missing_and_an_unknown_tensor_are_named(exported: Path, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    save_file({"weight": torch.ones(3, 2), "wait": torch.ones(3)}, tmp_path / "a.safetensors")
    differing = ["bias is absent there and (3,) here", "wait is (3,) there and absent here"]
    with refused(f"{tmp_path}/a.safetensors", "another model", *differing):
        open_weights(tmp_path / "a.safetensors").check(model)
    save_file({"weight": torch.full((3, 2), 2.0), "bias": torch.ones(3)}, tmp_path / "a.safetensors")
    weights = open_weights(tmp_path / "a.safetensors")
    weights.check(model)
    weights.fill(model)
    assert torch.equal(model.weight, torch.full((3, 2), 2.0))


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["export", "gone", "a.safetensors"], "gone", ["run directory"]),
        (["export", "{run}"], "", ["OUT"]),
        (["export", "{run}", "a.pt"], 'OUT = "a.pt"', [".safetensors"]),
        (["export", "{run}", "a.safetensors", "b"], "b", ["--help"]),
        (
            ["export", "{run}", "a.safetensors", "--stepp=1"],
            "--stepp",
            ["--step?"],
        ),
        (
            ["export", "{run}", "a.safetensors", "--step=7"],
            "--step = 7",
            ["{run}/checkpoint", "[2, 3]"],
        ),
        (
            ["export", "{run}/checkpoint/step-00000003", "a.safetensors", "--step=2"],
            "--step = 2",
            ["{run}/checkpoint/step-00000003"],
        ),
        (
            ["export", "{run}", "/proc/a.safetensors"],
            "/proc/a.safetensors",
            ["No such file or directory"],
        ),
        (["import", "gone.safetensors", "new"], "gone.safetensors", ["run directory", ".safetensors"]),
        (["import", "{file}", "/proc/new"], "/proc/new", ["No such file or directory"]),
        (
            ["import", "{file}", "new", "--dataset.image_size=16"],
            "dataset.image_size",
            ["dataset.root_dir"],
        ),
        (
            ["import", "{file}", "new", "--autoencoder.path=mine"],
            'autoencoder.path = "mine"',
            ["pixels"],
        ),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    about: str,
    mentions: list[str],
    trained: Path,
    exported: Path,
    tmp_path: Path,
    run_script: RunScript,
) -> None:
    places = {"run": trained, "file": exported}
    outcome = run_script("torchditan", *(argument.format(**places) for argument in arguments))
    assert (outcome.code, outcome.out) == (2, "")
    assert_refused(outcome.err, about.format(**places), [mention.format(**places) for mention in mentions])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "mentions"),
    [
        ("gone", [".safetensors", "run directory", "checkpoint"]),
        (".", ["config.json", "run directory"]),
        ("emty", [".safetensors", "run directory", "empty?"]),
        ("pipeline", ["diffusers", "--model.path", "--model.name"]),
        ("pipeline/transformer", ["diffusers", "--model.path", "--model.name"]),
        ("empty", ["empty/checkpoint", "checkpoint.save_final = false", "--checkpoint.enable_checkpoint"]),
    ],
)
def test_a_path_without_weights_is_refused(
    path: str, mentions: list[str], trained: Path, tmp_path: Path, run_script: RunScript
) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copy(trained / "config.json", tmp_path / "empty")
    (tmp_path / "pipeline" / "transformer").mkdir(parents=True)
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    (tmp_path / "pipeline" / "transformer" / "config.json").write_text('{"_class_name": "SD3Transformer2DModel"}')
    outcome = run_script("train.py", *job(tmp_path / "new", f"--checkpoint.initial_load_path={path}"))
    assert outcome.code == 2
    assert_refused(outcome.err, f'checkpoint.initial_load_path = "{path}"', mentions)
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_is_not_exported(trained: Path, tmp_path: Path, run_script: RunScript) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    checkpoint = run / "checkpoint" / "step-00000003"
    os.truncate(checkpoint / "__0_0.distcp", 1000)
    outcome = run_script("torchditan", "export", checkpoint, tmp_path / "a.safetensors")
    assert outcome.code == 2
    assert_refused(outcome.err, str(checkpoint), ["__0_0.distcp", "1,000 bytes"])
    outcome = run_script("train.py", *job(tmp_path / "new", f"--checkpoint.initial_load_path={checkpoint}"))
    assert outcome.code == 2
    assert_refused(outcome.err, f'checkpoint.initial_load_path = "{checkpoint}"', ["__0_0.distcp", "1,000 bytes"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


LARGE = {
    "model.flavor": "DiT-B",
    "model.input_channels": 4,
    "model.conditioning": "in_context",
    "model.sample_size": [32, 32],
    "dataset.image_size": [32, 32],
    "dataset.num_classes": 10,
}
SHARE = 1.3
"""Of the model, that a conversion may take of the host's memory."""


def large_config() -> Config:
    return Config().replace(LARGE)


def large_model() -> nn.Module:
    from torchditan.models import build_model_spec

    with torch.device("meta"):
        return build_model_spec(large_config().model, sample_shape=(4, 32, 32), num_classes=10).build()


def main(run: Path) -> None:
    """A checkpoint of the large model's raw weights, sharded over the ranks; every tensor is full of its number."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from torchditan.checkpoint.files import save_tensors, write_json, write_manifest

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, DTensor] = {}
    for number, (name, parameter) in enumerate(large_model().named_parameters()):
        full = torch.full(parameter.shape, float(number))
        state[name] = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    checkpoint = run / "checkpoint" / "step-00000007"
    save_tensors({"model": state}, checkpoint)
    if dist.get_rank() == 0:
        write_json(checkpoint / "config.json", to_dict(large_config()))
        write_json(checkpoint / "progress.json", {"step": 7, "images_seen": 70})
        write_manifest(checkpoint, step=7, trajectory={})
        (run / "config.json").write_text(json.dumps({"config": to_dict(large_config())}))
    dist.destroy_process_group()


MEASURE = """
import resource, sys
from pathlib import Path
sys.path[:0] = [{repository!r}, {repository!r} + '/tests', {repository!r} + '/tests/extras/weights']
from torchditan.extras.weights.importing import import_weights
from torchditan.checkpoint.safetensors_files import DTYPES
from torchditan.checkpoint.weights import save_weights
from torchditan.extras.weights.initial import load_initial_weights
from torchditan.extras.weights.opening import open_weights
from test_convert_checkpoint import large_config, large_model
model = large_model()
before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
{code}
# Not getrusage's peak, which begins with that of the process that started this one.
highest = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(highest) * 1024 - before)
"""


def peak_of(code: str) -> int:
    """Bytes of host memory that some lines take at their peak, over what the process had before."""
    command = [sys.executable, "-c", MEASURE.format(repository=str(REPOSITORY), code=code)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.slow)]
)
def test_no_conversion_takes_more_memory_than_the_model(
    world_size: int, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    run, file, half, imported = (tmp_path / name for name in ("run", "a.safetensors", "b.safetensors", "imported"))
    result = run_distributed(["tests/extras/weights/test_convert_checkpoint.py", run], world_size, timeout=600)
    assert result.returncode == 0, result.stderr
    size = sum(parameter.numel() * 4 for parameter in large_model().parameters())
    save = "save_weights(Path({out!r}), open_weights({source!r}), dtype=DTYPES[{dtype!r}])"
    peaks = {"export": peak_of(save.format(out=str(file), source=str(run), dtype="float32"))}
    model = "model.to_empty(device='cpu')"
    load = "load_initial_weights(model, {path!r}, config=large_config())"
    peaks["load a checkpoint"] = peak_of(f"{model}; {load.format(path=str(run))}")
    if world_size == 1:  # of a file the sharding is not known
        peaks["export bfloat16"] = peak_of(save.format(out=str(half), source=str(run), dtype="bfloat16"))
        peaks["load a file"] = peak_of(f"{model}; {load.format(path=str(file))}")
        peaks["import"] = peak_of(f"import_weights(Path({str(file)!r}), Path({str(imported)!r}))")
    for name, peak in peaks.items():
        of_what = size // 2 if name == "export bfloat16" else size
        print(f"{world_size} rank(s), {name}: {peak / of_what:.2f} of {of_what / 1e6:.0f} MB")  # shown by pytest -s
        assert peak < SHARE * of_what, name
    written = load_file(file)
    for number, (name, _) in enumerate(large_model().named_parameters()):
        assert bool((written[name] == number).all()), name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
