# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`training.attention_backend`: what is measured, what is chosen, and that a resumed run reuses it.

A CPU has two backends, flash and math. With those a run can be tested here; times are made up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.compiler.config as compiler_config
import torch.nn.functional as F

from torchditan import trainer
from torchditan.config.loader import from_dict
from torchditan.config.options import Config
from torchditan.data_stream.datasets import Batch
from torchditan.job import attention_backend, build
from torchditan.job.attention_backend import (
    BACKENDS,
    CANDIDATES,
    Call,
    attention_calls,
    chosen_by_torch,
    fastest,
    preferring,
    totals,
)
from torchditan.job.prepare import Job
from torchditan.models import ModelSpec, model_spec_of
from torchditan.periodic_tasks import StepResult
from torchditan.randomness import Randomness
from torchditan.run.reading import read_config
from torchditan.trainer import Trainer

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript

TINY = (
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--dataset.num_workers=0",
    "--training.global_batch_size=4",
    "--training.mixed_precision_param=float32",
    "--metrics.enable_sampling=false",
    "--metrics.experiment_name=run",
    "--checkpoint.enable_checkpoint",
)
CPU = torch.device("cpu")


def spec_of(**model: Any) -> ModelSpec:
    config = from_dict({"model": {"flavor": "debugmodel", "patch_size": 2, "input_channels": 3, **model}})
    return model_spec_of(config, sample_shape=(3, 8, 8), num_classes=10)


def test_ranks_that_share_tokens_attend_with_some_heads_to_all_tokens() -> None:
    ((whole, _),) = attention_calls(spec_of(), batch_size=6, dtype=torch.bfloat16).items()
    ((call, _),) = attention_calls(spec_of(), batch_size=6, dtype=torch.bfloat16, context_parallel_degree=2).items()
    batch, heads, *rest = whole.query.shape
    assert call.query.shape == (batch, heads // 2, *rest)


def test_the_calls_of_a_model_have_the_shapes_and_dtype_of_its_blocks() -> None:
    spec = spec_of()
    calls = attention_calls(spec, batch_size=6, dtype=torch.bfloat16)
    ((call, count),) = calls.items()
    with torch.device("meta"):
        assert count == len(spec.blocks(spec.build()))
    assert call.mask is None
    assert (call.query.shape[0], call.query.shape[2]) == (6, 16)
    assert {layout.dtype for layout in call[:3]} == {torch.bfloat16}
    query = call.arguments(CPU)["query"]
    assert (tuple(query.shape), query.stride(), query.dtype) == call.query
    assert query.requires_grad


def test_the_calls_of_a_model_of_captions_have_its_mask() -> None:
    spec = spec_of(text="cross_attention", text_tokens=5, text_width=8)
    masked = spec.conditioning.with_null(  # type: ignore[attr-defined]
        {"prompt_embeds": torch.zeros(5, 8), "prompt_attention_mask": torch.ones(5, dtype=torch.bool)}
    )
    calls = attention_calls(dataclasses.replace(spec, conditioning=masked), batch_size=2, dtype=torch.float32)
    with_mask = [call for call in calls if call.mask is not None]
    assert len(calls) == 2
    assert [call.key.shape[2] for call in with_mask] == [5]
    assert with_mask[0].arguments(CPU)["attn_mask"].all()
    F.scaled_dot_product_attention(**with_mask[0].arguments(CPU))


def call_of(*, tokens: int = 16, dtype: torch.dtype = torch.float32) -> Call:
    layout = attention_backend.Layout.of(torch.zeros(1, 2, tokens, 8), dtype)
    return Call(layout, layout, layout, None, False)


def test_each_call_counts_with_the_first_backend_that_computes_it() -> None:
    plain, masked, odd = call_of(tokens=4), call_of(tokens=5), call_of(tokens=6)
    times = {
        plain: {"cudnn": 4.0, "flash": 3.0, "efficient": 7.0},
        masked: {"cudnn": 2.0, "flash": None, "efficient": 5.0},
        odd: dict.fromkeys(CANDIDATES),
    }
    found = totals({plain: 10, masked: 1, odd: 3}, times)
    assert found == {"cudnn": 42.0, "flash": 35.0, "efficient": 75.0}
    times[plain]["cudnn"] = times[masked]["cudnn"] = None
    assert totals({plain: 10, masked: 1}, times) == {"flash": 35.0, "efficient": 75.0}
    assert totals({odd: 3}, times) == {}


@pytest.mark.parametrize(
    ("by_torch", "expected"), [("cudnn", "flash"), ("flash", "flash"), ("efficient", "efficient"), ("math", "flash")]
)
def test_torchs_choice_stays_unless_another_is_clearly_faster(by_torch: str, expected: str) -> None:
    assert fastest({"cudnn": 110.0, "flash": 100.0, "efficient": 102.0}, by_torch=by_torch) == expected


def kernel() -> str:
    """The kernel that computes attention here."""
    q = torch.zeros(1, 1, 4, 8, requires_grad=True)
    function = F.scaled_dot_product_attention(q, q, q).grad_fn
    assert function is not None
    return "flash" if "Flash" in function.name() else "math"


def test_a_preference_ends_with_its_body_and_is_part_of_the_key_of_compiled_code() -> None:
    assert kernel() == "flash"
    with preferring("math"):
        assert kernel() == "math"
        assert compiler_config.cache_key_tag == "attention:math"
        with preferring("flash"):
            assert kernel() == "flash"
    with preferring("cudnn"):  # no CPU has it: the next one that computes the call
        assert kernel() == "flash"
    assert kernel() == "flash"
    assert compiler_config.cache_key_tag == ""


def test_torch_says_which_backends_compute_a_call() -> None:
    assert chosen_by_torch(call_of(), CPU) == "flash"
    here = {name: chosen_by_torch(call_of(), CPU, only=name) for name in BACKENDS}
    assert here == {"cudnn": None, "flash": "flash", "efficient": None, "math": "math"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel of attention in each training step."""
    seen: list[str] = []
    plain_step = Trainer.train_step

    def train_step(trainer: Trainer, batches: Iterator[tuple[Batch, Randomness]]) -> StepResult:
        seen.append(kernel())
        return plain_step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    return seen


def test_a_backend_that_is_set_is_used_and_recorded(run_script: RunScript, tmp_path: Path, kernels: list[str]) -> None:
    flags = [*TINY, f"--job.dump_folder={tmp_path}"]
    outcome = run_script("train.py", *flags, "--training.steps=1", "--training.attention_backend=math")
    assert outcome.code == 0, outcome.err
    assert "attention: math, as training.attention_backend says\n" in outcome.out
    assert read_config(tmp_path / "run")["attention_backend"]["backend"] == "math"
    outcome = run_script("train.py", *flags, "--training.steps=2")  # auto, which does not measure a CPU
    assert outcome.code == 0, outcome.err
    assert "attention:" not in outcome.out
    assert kernels == ["math", "flash"]
    assert kernel() == "flash"


def test_a_resumed_run_reuses_its_choice_unless_its_device_lacks_it(
    run_script: RunScript, tmp_path: Path, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(call: Call, backend: str, device: torch.device) -> float | None:
        measured.append(backend)
        return {"flash": 2000.0, "efficient": 1000.0}.get(backend)

    def on_a_gpu(job: Job, say: Callable[[str], None]) -> AbstractContextManager[None]:
        return attention_backend.chosen_backend(job, say)

    monkeypatch.setattr(attention_backend, "measure", measure)
    monkeypatch.setattr(trainer, "attention_backend", on_a_gpu)
    flags = [*TINY, f"--job.dump_folder={tmp_path}"]
    path = tmp_path / "run" / "config.json"

    def train(steps: int) -> tuple[str, dict[str, Any]]:
        outcome = run_script("train.py", *flags, f"--training.steps={steps}")
        assert outcome.code == 0, outcome.err
        (line,) = [line for line in outcome.out.splitlines() if line.startswith("attention: ")]
        return line, read_config(tmp_path / "run")

    line, first = train(1)
    num_calls = 3  # blocks of the debugmodel
    assert line.endswith("measured per micro-batch: flash 6.00 ms, efficient 3.00 ms")
    assert first["attention_backend"]["backend"] == "efficient"
    assert first["attention_backend"]["microseconds"] == {"flash": num_calls * 2000, "efficient": num_calls * 1000}
    assert measured == list(CANDIDATES)
    assert "attention_backend" not in str(first["trajectory"])

    # This CPU has no efficient: as after a move to another device, the run measures again.
    train(2)
    assert measured == 2 * list(CANDIDATES)

    path.write_text(json.dumps({**first, "attention_backend": {"backend": "math", "microseconds": {"math": 1.0}}}))
    line, third = train(3)
    assert line == "attention: math, as this run measured before"
    assert (third["attention_backend"]["backend"], third["attention_backend"]["microseconds"]) == ("math", {"math": 1})
    assert measured == 2 * list(CANDIDATES)
    assert kernels == ["math"] * 3  # efficient is not here, and math follows it


def test_two_ranks_use_one_backend(run_distributed: RunDistributed, tmp_path: Path) -> None:
    flags = [*TINY, f"--job.dump_folder={tmp_path}", "--training.steps=1", "--training.attention_backend=math"]
    finished = run_distributed(["train.py", *flags], world_size=2)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("attention: math") == 1
    assert read_config(tmp_path / "run")["attention_backend"]["backend"] == "math"


def test_a_rank_that_is_not_the_first_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backend, "measure", lambda *_: pytest.fail("it measured"))
    config = Config().replace({"training.attention_backend": "auto"})
    job: Any = SimpleNamespace(config=config, device=CPU, rank=SimpleNamespace(rank=1))
    assert attention_backend._choose(job) is None


def test_auto_measures_gpus_only_and_no_deterministic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backend, "chosen_backend", lambda *_: nullcontext("measured"))

    def outcome(device: str, **training: Any) -> Any:
        config = Config().replace({f"training.{name}": value for name, value in training.items()})
        job: Any = SimpleNamespace(config=config, device=torch.device(device))
        with build.attention_backend(job, print) as result:
            return result

    assert outcome("cuda") == "measured"
    assert outcome("cuda", deterministic=True) is None
    assert outcome("cuda", attention_backend="default") is None
    assert outcome("cpu") is outcome("cpu", attention_backend="cudnn") is None
    assert outcome("cpu", attention_backend="math") == "measured"
    assert outcome("cuda", attention_backend="flash", deterministic=True) == "measured"


class Clock:
    """In place of `torch.cuda.Event`: each interval takes ten milliseconds more than the one before."""

    intervals = 0

    def __init__(self, *, enable_timing: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Clock) -> float:
        Clock.intervals += 1
        return 10.0 * Clock.intervals


def test_a_measurement_is_the_median_of_rounds_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "intervals", 0)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    assert attention_backend.measure(call_of(), "flash", CPU) == 1000 * 30 / 5  # of 20, 30 and 40 ms for 5 repeats
    assert attention_backend.measure(call_of(), "cudnn", CPU) is None


@pytest.mark.gpu
def test_a_gpu_measures_its_backends_which_agree() -> None:
    device = torch.device("cuda")
    layout = attention_backend.Layout((2, 4, 512, 64), (131072, 32768, 64, 1), torch.bfloat16)
    call = Call(layout, layout, layout, None, False)
    times = {name: attention_backend.measure(call, name, device) for name in CANDIDATES}
    assert sum(time is not None for time in times.values()) >= 2
    arguments = call.arguments(device)
    with preferring("math"):
        exact = F.scaled_dot_product_attention(**arguments)
    for name in [name for name, time in times.items() if time is not None]:
        with preferring(name):
            assert chosen_by_torch(call, device, only=name) == name
            torch.testing.assert_close(F.scaled_dot_product_attention(**arguments), exact, rtol=2e-2, atol=2e-2)
