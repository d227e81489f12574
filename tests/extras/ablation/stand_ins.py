# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A fake torchrun and train.py that starts in milliseconds. The options of a run select the behaviour of its ranks.

With batch 32 or more the ranks run out of memory. With patch size 4 rank 1 crashes; with patch size 8 rank 0 hangs.
"""

from __future__ import annotations

from pathlib import Path

from torchditan.extras.ablation.device import Device

REPOSITORY = Path(__file__).resolve().parents[3]

CPU = Device("cpu", "a CPU", None, 16.0, "float8.enable_float8_linear = true: a CPU has none", None)

TORCHRUN = """
import os, subprocess, sys, time
count = int(sys.argv[1].split("=")[1])
launcher = {"TORCHELASTIC_RUN_ID": "none", "LAUNCHER": str(os.getpid())}
ranks = [
    subprocess.Popen(
        [sys.executable, *sys.argv[4:]],
        env={**os.environ, **launcher, "RANK": str(rank), "WORLD_SIZE": str(count)},
        start_new_session=True,
    )
    for rank in range(count)
]
while True:
    codes = [rank.poll() for rank in ranks]
    if any(codes) or None not in codes:
        break
    time.sleep(0.01)
time.sleep(0.05)
for rank in ranks:
    rank.terminate()
sys.exit(1)  # whatever happened
"""

TRAIN = """
import json, os, sys, time
from pathlib import Path
from torchditan.supervision.rank_status import write_rank_status
from torchditan.supervision.exit_status import run_job

given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
if "job.config_file" in given:
    from torchditan.config.loader import tomllib  # load_config would import torch
    tables = tomllib.loads(Path(given["job.config_file"]).read_text())
    given = {**{f"{table}.{option}": value for table in tables for option, value in tables[table].items()}, **given}
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
batch, patch, steps = int(given["training.batch_size"]), int(given["model.patch_size"]), int(given["training.steps"])
folder = Path(given["job.dump_folder"]) / given["metrics.experiment_name"]

def main():
    if os.getppid() != int(os.environ["LAUNCHER"]):
        sys.exit(1)  # it was killed before this rank could ask to be killed with it
    write_rank_status("running", first_step_at=time.time())
    if rank == 0:
        hardware = {"device": "cpu", "device_name": "a CPU", "hostname": "here"}
        versions = {"python": "3", "torch": "2"}
        content = {"config": {}, "git_commit": "abc", "versions": versions, "hardware": hardware}
        (folder / "config.part").write_text(json.dumps(content))
        (folder / "config.part").rename(folder / "config.json")
    with open(folder / "metrics.jsonl", "a") as metrics:
        for step in range(1, steps + 1 if rank == 0 else 1):
            seconds = 5.0 if step == 1 else 0.5
            images = batch * world_size / seconds
            record = {"step": step, "loss": 1 / step, "step_time_s": seconds, "images_per_second": images,
                      "tflops_per_device": 2.0, "mfu": None, "peak_memory_gib": batch / 8, "peak_reserved_gib": None}
            metrics.write(json.dumps(record) + chr(10))
    while not (folder / "config.json").exists():
        time.sleep(0.01)
    if batch >= 32 and rank == world_size - 1:
        raise MemoryError("no memory for a batch of 32")
    if patch == 4 and rank == world_size - 1:
        raise RuntimeError("a tensor of the wrong shape")
    if patch == 8 and rank == 0 or os.environ.get("SLOW_RUNS"):
        time.sleep(float(os.environ.get("SLOW_RUNS", 60)))
    if batch >= 32 or patch == 4:
        time.sleep(60)  # the others wait, until they are ended
    write_rank_status("completed", step=steps, peak_memory_gib=batch / 8 + rank, alloc_retries=int(batch == 31))

if __name__ == "__main__":
    sys.exit(run_job(main))
"""
