# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Jobs that are executed in this process, in no time, on an imagined CPU.

With batch 32 or more the last rank runs out of memory; with patch size 4 it crashes.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

from torchditan.config.loader import load_config
from torchditan.extras.ablation.device import Device
from torchditan.extras.ablation.launch import Job, Outcome

CPU = Device("cpu", "a CPU", None, 16.0, "float8.enable_float8_linear = true: a CPU has none", None)
_LAUNCHES = itertools.count(1)


def execute_here(job: Job, *, on_tick: Any = None) -> Outcome:
    """What the ranks of a job come to: step 1 takes 5 s, each other one half a second."""
    config = load_config([word for word in job.program if word.startswith("--")])
    batch_size, num_ranks = config.training.batch_size, job.num_ranks or 1
    assert isinstance(batch_size, int)
    job.folder.mkdir(parents=True, exist_ok=True)
    stored = {"config": {}, "git_commit": "abc", "versions": {"python": "3", "torch": "2"}}
    stored["hardware"] = {"device": "cpu", "device_name": "a CPU", "hostname": "here"}
    (job.folder / "config.json").write_text(json.dumps(stored))
    lines = []
    for step in range(1, config.training.steps + 1):
        seconds = 5.0 if step == 1 else 0.5
        record = {"step": step, "loss": 1 / step, "step_time_s": seconds, "tflops_per_device": 2.0, "mfu": None}
        record |= {"images_per_second": batch_size * num_ranks / seconds, "peak_memory_gib": batch_size / 8}
        lines.append(json.dumps({**record, "peak_reserved_gib": None}))
    (job.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    started, last = time.time(), num_ranks - 1
    ranks = [
        {
            "first_step_at": started + next(_LAUNCHES),
            "peak_memory_gib": batch_size / 8 + rank,
            "alloc_retries": int(batch_size == 31),
        }
        for rank in range(num_ranks)
    ]
    if batch_size >= 32:
        return Outcome("oom", f"rank {last}: no memory for a batch of 32", started, 1.0, ranks)
    if config.model.patch_size == 4:
        return Outcome("error", f"rank {last}: RuntimeError: a tensor of the wrong shape", started, 1.0, ranks)
    return Outcome("completed", None, started, 1.0, ranks)
