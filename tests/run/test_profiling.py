# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Traces and memory snapshots are written to the right files for the right steps."""

from __future__ import annotations

import json
import pickle
import time

import pytest
import torch
from emulated_gpu import skip_if_emulated

from torchditan.config.options import Profiling
from torchditan.run import profiling as profiling_module
from torchditan.run.directory import RunDirectory
from torchditan.run.profiling import Profiler
from torchditan.run.reading import read_metrics

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run", is_writer=True)


def work(profiler, first, last, device=CPU):
    for step in range(first, last + 1):
        with torch.profiler.record_function(f"train_step_{step}"):
            torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
        profiler.step(step)


def names(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def files(run):
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())


def test_one_trace_each_profile_freq_steps_holds_that_step_only_also_after_a_resume(run):
    config = Profiling(enable_profiling=True, profile_freq=4, save_traces_folder="traces")
    with Profiler(config, run, 1, device=CPU, start_step=2) as profiler:
        work(profiler, 3, 10)
    assert files(run) == ["traces/step_00000004/rank1.json", "traces/step_00000008/rank1.json"]
    recorded = names(run.path / "traces/step_00000008/rank1.json")
    assert "train_step_8" in recorded and "aten::mm" in recorded
    assert not recorded & {"train_step_7", "train_step_9", "train_step_4"}


def test_writing_a_trace_is_not_step_time(tmp_path, monkeypatch, train):
    write = profiling_module._write

    def write_slowly(path, save):
        time.sleep(1)
        write(path, save)

    monkeypatch.setattr(profiling_module, "_write", write_slowly)
    train("run", "--training.steps=3", "--profiling.enable_profiling", "--profiling.profile_freq=2")
    record = read_metrics(tmp_path / "run")[-1]
    assert record["profiling_s"] > 1 > record["step_time_s"]


@pytest.mark.gpu
def test_gpu_traces_hold_kernels_and_snapshots_load_also_that_of_running_out_of_memory(run):
    device = torch.device("cuda")
    config = Profiling(enable_profiling=True, enable_memory_snapshot=True, profile_freq=2)
    with pytest.raises(torch.OutOfMemoryError), Profiler(config, run, 0, device=device) as profiler:
        work(profiler, 1, 2, device)
        raise torch.OutOfMemoryError("CUDA out of memory")
    for name in ("step_00000002", "step_00000003_oom"):
        with open(run.path / "memory_snapshot" / name / "rank0.pickle", "rb") as file:
            assert "segments" in pickle.load(file)
    events = json.loads((run.path / "profile_trace/step_00000002/rank0.json").read_text())["traceEvents"]
    skip_if_emulated("it has no CUPTI, which records kernels")
    assert any(event.get("cat") == "kernel" for event in events)
