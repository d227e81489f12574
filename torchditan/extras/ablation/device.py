# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Detects the devices of this machine in a separate process, because detection takes memory on every GPU."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from torchditan.extras.ablation.grid import PARALLEL, PRECISION, Run


@dataclass(frozen=True)
class Device:
    """The devices of one machine, which must all be alike."""

    type: str
    """cuda or cpu."""
    name: str
    count: int | None
    """None for a CPU, which takes any number of ranks."""
    memory_gib: float
    no_float8: str | None
    """Reason why float8 cells cannot run here."""
    no_emulated_float8: str | None

    @staticmethod
    def here() -> Device:
        """Those that a run on this machine would use."""
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_look).result()

    def refuses(self, run: Run) -> str | None:
        """Reason why this machine cannot make the run; None if it can."""
        if self.count is not None and run.num_devices > self.count:
            return f"{PARALLEL} {run.axes[PARALLEL]} needs {run.num_devices} devices, this machine has {self.count}"
        if run.axes[PRECISION] == "bfloat16_f8":
            return self.no_emulated_float8 if run.config.float8.emulate else self.no_float8
        return None


def _look() -> Device:
    import torch

    from torchditan.config.options import Float8
    from torchditan.distributed.float8 import check_float8
    from torchditan.errors import ConfigError
    from torchditan.run.provenance import device_name

    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    if is_cuda:
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def refusal(*, emulate: bool) -> str | None:
        try:
            check_float8(Float8(enable_float8_linear=True, emulate=emulate), device=device)
        except ConfigError as error:
            return str(error)
        return None

    return Device(
        type=device.type,
        name=device_name(str(device)),
        count=torch.cuda.device_count() if is_cuda else None,
        memory_gib=memory / 1024**3,
        no_float8=refusal(emulate=False),
        no_emulated_float8=refusal(emulate=True),
    )
