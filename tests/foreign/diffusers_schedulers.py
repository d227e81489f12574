# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The scheduler tests of diffusers (tests/schedulers/) on our samplers and noise levels.

    python tests/foreign/diffusers_schedulers.py --source DIFFUSERS_CHECKOUT

Notable:
- nothing of their schedulers computes here. An option that we do not have is an error;
- a scheduler is called once per step, and a sampler of ours calls the model. `Steps` runs our sampler with the outputs
  seen so far, until it asks for another;
- DDIM is `DDPM.sample`. On the straight path with t = 1 / (1 + sigma), Euler steps in sigma are Euler steps in t, and
  DPM-Solver++ stays what it is. Heun's method depends on the variable: `Heun.flow` integrates over -sigma, as theirs;
- their Euler and Heun use noise levels between ours: those of our table, interpolated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import foreign_suite
import numpy as np
import torch

from torchditan.config.options import Sampling
from torchditan.diffusion import ddpm, noise_schedules
from torchditan.diffusion.ddpm import DDPM
from torchditan.diffusion.dpm_solver import DPMSolver2M
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.samplers import Euler, Heun
from torchditan.diffusion.timesteps import Timesteps, shift_timesteps
from torchditan.models.spec import Unconditional
from torchditan.randomness import Randomness

TESTS = ("ddim", "dpm_multi", "heun", "euler", "flow_map_euler_discrete")
PREDICTIONS: dict[str, Any] = {"epsilon": "epsilon", "v_prediction": "v", "sample": "x"}
OUR_BETAS = {"linear": (0.0001, 0.02), "scaled_linear": (0.00085, 0.012)}

COPY = "compares a scheduler with a copy from its saved config: no numbers of ours"
CONFIG = "ConfigMixin: saving, loading and attributes of a config"
SKIPPED = {
    **{
        f"*::test_{name}": COPY
        for name in (
            *("timesteps", "betas", "schedules", "prediction_type", "clip_sample", "timestep_spacing", "time_indices"),
            *("rescale_betas_zero_snr", "inference_steps", "eta", "timestep_type", "karras_sigmas", "variance_type"),
            *("beta_sigmas", "exponential_sigmas", "lower_order_final", "euler_at_final", "lambda_min_clipped"),
            "thresholding",
        )
    },
    "*::test_steps_offset": f"{COPY}; we have no offset of levels",
    "*::test_from_save_pretrained": CONFIG,
    "*::test_from_pretrained": CONFIG,
    "*::test_compatibles": CONFIG,
    "*::test_getattr_is_correct": CONFIG,
    "*::test_trained_betas": f"{CONFIG}, and betas of a user, which we do not have",
    "*::test_switch": f"{CONFIG}: converts a scheduler to other ones",
    "*::test_full_loop_with_no_set_alpha_to_one": "our steps end at the sample, not at the level before it",
    "*_karras_*": "we have no Karras noise levels",
    "*::test_full_loop_with_lu_*": "we have no levels of Lu et al.",
    "*::test_full_loop_no_noise_thres": "we have no dynamic thresholding",
    "*::test_fp16_support": "we have no dynamic thresholding, and sample in float32",
    "DPMSolverMultistep*::test_solver_order_and_type": "we have DPM-Solver++(2M), and no other orders and SDE solvers",
    "DPMSolverMultistep*::test_custom_timesteps": "with SDE solvers, which we do not have",
    "EulerDiscrete*::test_custom_timesteps": "with interpolation of log sigma, which we do not have",
    "EulerDiscrete*::test_custom_sigmas": "noise levels of a user, which we do not have",
    "FlowMap*::test_step_index_advances": "a counter of steps inside the scheduler",
    "FlowMap*::test_set_begin_index_*": "a counter of steps inside the scheduler",
    "FlowMap*::test_step_off_schedule_anystep_supported": "a counter of steps inside the scheduler",
    **{f"{name}::*": "base class, which has no scheduler" for name in ("SchedulerCommonTest",)},
}


class Pause(Exception):
    """Our sampler asks for the model at x."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Steps:
    """A sampler of ours, one evaluation of the model at a time.

    Args:
        solve: calls predict(x, t) for each output of the model, which comes with the sample that the model saw. Returns
            the samples.
    """

    def __init__(self, solve: Callable[[Callable[..., Any]], torch.Tensor]) -> None:
        self.solve = solve
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(self, output: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """The state at the next evaluation, or the samples."""
        self.seen.append((output, sample))
        seen = iter(self.seen)

        def predict(x: torch.Tensor, t: float) -> tuple[torch.Tensor, torch.Tensor]:
            for found in seen:
                return found
            raise Pause(x)

        try:
            return self.solve(predict)
        except Pause as pause:
            return pause.x


class Output(dict[str, torch.Tensor]):
    """Their tests read the result of a step as an attribute and as a dict."""

    @property
    def prev_sample(self) -> torch.Tensor:
        return self["prev_sample"]


class Scheduler:
    """The interface of a scheduler. Levels are numbers in their table, of which ours has 1000."""

    order = 1
    is_exact = True
    """Whether the table is computed from float64, as ours is, and not from float32, as theirs."""
    init_noise_sigma: Any = 1.0
    _deprecated_kwargs: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[dict[str, Any]] = {}
    """Their values of options that we have in another form."""
    without: ClassVar[dict[str, Any]] = {}
    """Options that we do not have, with the value that we compute."""

    def __init__(self, **config: Any) -> None:
        defaults: dict[str, Any] = {
            "num_train_timesteps": 1000,
            "beta_start": 0.0001,
            "beta_end": 0.02,
            "beta_schedule": "linear",
            "prediction_type": "epsilon",
            **self.defaults,
        }
        for name, value in config.items():
            if name not in defaults and self.without.get(name) != value:
                raise NotImplementedError(f"{name} = {value}")
        self.config = SimpleNamespace(**{**defaults, **config})
        self.objective = DDPM(
            conditioning=Unconditional(),
            label_dropout=0.0,
            prediction=PREDICTIONS[self.config.prediction_type],
            schedule=self.config.beta_schedule,
            learn_sigma=False,
        )
        self.steps = Steps(lambda predict: torch.zeros(()))
        self.timesteps = torch.arange(self.config.num_train_timesteps - 1, -1, -1)
        self.last: torch.Tensor | None = None

    @contextmanager
    def levels(self) -> Iterator[None]:
        """Our tables have their number of levels and their betas."""
        config, number = self.config, self.config.num_train_timesteps
        with (
            mock.patch.object(noise_schedules, "NUM_LEVELS", number),
            mock.patch.object(ddpm, "NUM_LEVELS", number),
        ):
            if (config.beta_start, config.beta_end) == OUR_BETAS[config.beta_schedule] and self.is_exact:
                yield
            else:
                assert config.beta_schedule == "linear"
                dtype = torch.float64 if self.is_exact else torch.float32
                betas = torch.linspace(config.beta_start, config.beta_end, number, dtype=dtype)
                with mock.patch.object(noise_schedules, "betas", return_value=betas):
                    yield

    def table(self) -> noise_schedules.Levels:
        with self.levels():
            return noise_schedules.levels_of(self.config.beta_schedule)

    def spaced(self, num_steps: int) -> list[int]:
        """Our levels, from noise to data."""
        with self.levels():
            return noise_schedules.spaced_levels(self.config.timestep_spacing, num_steps)[::-1]

    def scale_model_input(self, sample: torch.Tensor, timestep: Any) -> torch.Tensor:
        return sample

    def add_noise(self, sample: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        level = (timesteps + 0.5).expand(len(sample)) / self.config.num_train_timesteps
        randomness = Randomness(noise=noise, timestep=level, label_dropout=torch.ones(len(sample)))
        noise_schedules._stacked.cache_clear()
        with self.levels():
            return self.objective.inputs({"sample": sample}, randomness).x_t

    def step(
        self, output: torch.Tensor, timestep: Any, sample: torch.Tensor, *_: Any, return_dict: bool = True, **__: Any
    ) -> Any:
        """Continues if `sample` is what the last step returned. Else a new run begins at this timestep."""
        if sample is not self.last:
            first = int((self.timesteps - timestep).abs().argmin())
            self.steps = Steps(functools.partial(self.solve, first, sample))
        with self.levels():
            self.last = self.steps.step(output, sample)
        return Output(prev_sample=self.last) if return_dict else (self.last,)

    def solve(self, first: int, sample: torch.Tensor, predict: Callable[..., Any]) -> torch.Tensor:
        """Our sampler, from timestep number `first` to the end."""
        raise NotImplementedError


class OurDDIM(Scheduler):
    defaults: ClassVar = {"timestep_spacing": "leading", "clip_sample": True}
    without: ClassVar = {"set_alpha_to_one": True}

    def set_timesteps(self, num_inference_steps: int) -> None:
        self.timesteps = torch.tensor(self.spaced(num_inference_steps))

    def solve(self, first: int, sample: torch.Tensor, predict: Callable[..., Any]) -> torch.Tensor:
        kept = self.timesteps[first:].tolist()
        numbers = iter(kept)

        def output(x: torch.Tensor, t: float) -> torch.Tensor:
            found = predict(x, t)[0]
            assert round(t * self.config.num_train_timesteps) == next(numbers)
            return found

        sampling = Sampling(sampler="ddim", num_steps=len(kept), clip_sample=self.config.clip_sample)
        with mock.patch.object(ddpm, "spaced_levels", return_value=kept[::-1]):
            return self.objective.sample(output, sample, sampling=sampling, step_noise=no_noise)

    def _get_variance(self, level: int, level_before: int) -> torch.Tensor:
        with self.levels():
            kept = noise_schedules.levels_of(self.config.beta_schedule, [level_before, level])
        return kept.log_posterior_variance[1].exp()


class OurDPMSolver(Scheduler):
    defaults: ClassVar = {"timestep_spacing": "linspace", "final_sigmas_type": "zero"}
    without: ClassVar = {
        "solver_order": 2,
        "thresholding": False,
        "sample_max_value": 1.0,
        "algorithm_type": "dpmsolver++",
        "solver_type": "midpoint",
        "lower_order_final": False,
        "euler_at_final": False,
        "lambda_min_clipped": -float("inf"),
        "variance_type": None,
    }

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.config.solver_order = 2  # read by their tests

    def set_timesteps(self, num_inference_steps: int) -> None:
        self.timesteps = torch.tensor(self.spaced(num_inference_steps + 1)[:-1])
        self.num_inference_steps = num_inference_steps

    def solve(self, first: int, sample: torch.Tensor, predict: Callable[..., Any]) -> torch.Tensor:
        table, kept = self.table(), [*self.timesteps[first:].tolist(), 0]
        levels = [(table.signal[k].item(), table.noise[k].item()) for k in kept]
        if self.config.final_sigmas_type == "zero":
            levels[-1] = (1.0, 0.0)
        scales = iter([signal + noise for signal, noise in levels])
        ats = iter(levels)

        def velocity(x: torch.Tensor, t: float) -> torch.Tensor:
            scale = next(scales)
            signal, noise = next(ats)
            output, seen = predict(scale * x, t)
            clean, predicted = self.objective._clean_and_noise(
                output, seen, SimpleNamespace(signal=signal, noise=noise)
            )
            return clean - predicted

        timesteps = [signal / (signal + noise) for signal, noise in levels]
        x = DPMSolver2M().flow(velocity, sample / sum(levels[0]), timesteps=timesteps, step_noise=no_noise)
        return sum(levels[-1]) * x


class OverSigma(Scheduler):
    """Their samples are x + sigma noise.

    The table comes from float32: two expected sums have the error of their first level (8e-5 of sigma) in them.
    """

    is_exact = False
    defaults: ClassVar = {"timestep_spacing": "linspace", "final_sigmas_type": "zero"}
    without: ClassVar = {"interpolation_type": "linear"}

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        table = self.table()
        self.sigma_table = (table.noise.double() / table.signal.double()).numpy()
        self.set_timesteps(self.config.num_train_timesteps)

    @property
    def init_noise_sigma(self) -> torch.Tensor:  # type: ignore[override]
        largest = torch.tensor(self.sigmas[0])
        return largest if self.config.timestep_spacing != "leading" else (largest**2 + 1).sqrt()

    def set_timesteps(self, num_inference_steps: int | None, *, device: Any = None, timesteps: Any = None) -> None:
        number = self.config.num_train_timesteps
        if timesteps is not None:
            kept = np.array(timesteps, dtype=np.float32)
        elif self.config.timestep_spacing == "linspace":
            kept = np.linspace(0, number - 1, num_inference_steps or 0, dtype=np.float32)[::-1].copy()
        else:
            kept = np.array(self.spaced(num_inference_steps or 0), dtype=np.float32)
        end = self.sigma_table[0] if self.config.final_sigmas_type == "sigma_min" else 0.0
        self.sigmas = [*map(self.sigma_of, kept), float(end)]
        self.kept = torch.from_numpy(kept)
        self.timesteps = self.evaluated(self.kept)

    def evaluated(self, kept: torch.Tensor) -> torch.Tensor:
        """The timesteps of the calls of the model."""
        return kept

    def sigma_of(self, timestep: Any) -> float:
        return float(np.interp(float(timestep), np.arange(len(self.sigma_table)), self.sigma_table))

    def scale_model_input(self, sample: torch.Tensor, timestep: Any) -> torch.Tensor:
        return sample / (self.sigma_of(timestep) ** 2 + 1) ** 0.5

    def add_noise(self, sample: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        sigma = self.sigma_of(timesteps[0])
        return (1 + sigma) * straight_path(1 / (1 + sigma), sample, noise)

    def clean_and_noise(
        self, output: torch.Tensor, sample: torch.Tensor, sigma: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        signal = 1 / (1 + sigma**2) ** 0.5
        at: Any = SimpleNamespace(signal=signal, noise=sigma * signal)
        return self.objective._clean_and_noise(output, sample * signal, at)


class OurEuler(OverSigma):
    def step(self, output: torch.Tensor, timestep: Any, sample: torch.Tensor, *_: Any, **options: Any) -> Any:
        self.last = None  # their tests step from a scaled sample, so each step is a run
        return super().step(output, timestep, sample, **options)

    def solve(self, first: int, sample: torch.Tensor, predict: Callable[..., Any]) -> torch.Tensor:
        sigma, sigma_next = self.sigmas[first : first + 2]

        def velocity(x: torch.Tensor, t: float) -> torch.Tensor:
            clean, noise = self.clean_and_noise(*predict(x, t), sigma)
            return clean - noise

        timesteps = [1 / (1 + sigma), 1 / (1 + sigma_next)]
        x = Euler().flow(velocity, sample / (1 + sigma), timesteps=timesteps, step_noise=no_noise)
        return (1 + sigma_next) * x


class OurHeun(OverSigma):
    order = 2
    without: ClassVar = {}

    def evaluated(self, kept: torch.Tensor) -> torch.Tensor:
        return torch.cat([kept[:1], kept[1:].repeat_interleave(2)])

    def step(self, output: torch.Tensor, timestep: Any, sample: torch.Tensor, *_: Any, **options: Any) -> Any:
        """Two calls are one step of ours, except at the end, where both methods are Euler's."""
        is_second = len(self.steps.seen) == 1 and self.is_open
        self.last = sample if is_second else None
        found = super().step(output, timestep, sample, **options)
        self.is_open = not is_second
        return found

    def set_timesteps(self, *given: Any, **options: Any) -> None:
        super().set_timesteps(*given, **options)
        self.is_open = False

    def solve(self, first: int, sample: torch.Tensor, predict: Callable[..., Any]) -> torch.Tensor:
        number = (first + 1) // 2
        last = torch.zeros(())

        def velocity(x: torch.Tensor, minus_sigma: float) -> torch.Tensor:
            nonlocal last
            if minus_sigma < 0:  # else the slope before, as in `sampling_velocity`
                last = -self.clean_and_noise(*predict(x, minus_sigma), -minus_sigma)[1]
            return last

        timesteps = [-sigma for sigma in self.sigmas[number : number + 2]]
        return Heun().flow(velocity, sample, timesteps=timesteps, step_noise=no_noise)


class OurFlowMap:
    """Euler steps between any two timesteps of the straight path."""

    step_index = begin_index = None
    output: ClassVar[Any] = None
    """Their class of a step's output."""

    def __init__(self, num_train_timesteps: int, shift: float) -> None:
        self.config = SimpleNamespace(num_train_timesteps=num_train_timesteps, shift=shift)

    def set_timesteps(self, num_inference_steps: int = 0, *, sigmas: Any = None, timesteps: Any = None) -> None:
        if timesteps is not None:
            sigmas = [t / self.config.num_train_timesteps for t in timesteps]
        if sigmas is None:
            grid = Timesteps(kind="uniform", shift=self.config.shift).grid(num_inference_steps)
            sigmas = [1 - t for t in grid[:-1]]
        self.num_inference_steps = len(sigmas)
        self.sigmas = torch.tensor([*sigmas, 0.0])
        self.timesteps = self.config.num_train_timesteps * self.sigmas[:-1]

    def apply_shift(self, sigmas: torch.Tensor) -> torch.Tensor:
        return 1 - shift_timesteps(1 - sigmas, self.config.shift)

    def step(
        self,
        output: torch.Tensor,
        timestep: torch.Tensor,
        sample: torch.Tensor,
        *,
        r_timestep: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        timesteps = [self.time(timestep), self.time(torch.zeros(1) if r_timestep is None else r_timestep)]
        x = Euler().flow(lambda x, t: -output, sample, timesteps=timesteps, step_noise=no_noise)
        return self.output(prev_sample=x) if return_dict else (x,)

    def scale_noise(self, sample: torch.Tensor, timestep: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return straight_path(self.time(timestep), sample, noise)

    def time(self, timestep: torch.Tensor) -> float:
        return 1 - timestep.item() / self.config.num_train_timesteps


def straight_path(t: float, sample: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """t sample + (1 - t) noise, as flow matching trains on it."""
    objective = FlowMatching(Unconditional(), Timesteps(kind="uniform"), label_dropout=0.0)
    randomness = Randomness(noise=noise, label_dropout=torch.ones(len(sample)))
    return objective.inputs_at(torch.full((len(sample),), t), {"sample": sample}, randomness).x_t


def no_noise(number: int) -> torch.Tensor:
    raise AssertionError("a deterministic sampler draws no noise")


OURS = {
    "DDIMSchedulerTest": OurDDIM,
    "DPMSolverMultistepSchedulerTest": OurDPMSolver,
    "HeunDiscreteSchedulerTest": OurHeun,
    "EulerDiscreteSchedulerTest": OurEuler,
}


def replace(module: ModuleType) -> None:
    """Our classes in their test cases."""
    for name, ours in OURS.items():
        if hasattr(module, name):
            getattr(module, name).scheduler_classes = (ours,)
    if hasattr(module, "FlowMapEulerDiscreteSchedulerTest"):
        module.FlowMapEulerDiscreteSchedulerTest.scheduler_class = OurFlowMap
        OurFlowMap.output = module.FlowMapEulerDiscreteSchedulerOutput


if __name__ == "__main__":
    tests = [f"tests/schedulers/test_scheduler_{name}.py" for name in TESTS]
    sys.exit(foreign_suite.main(__doc__ or "", tests=tests, replace=replace, skipped=SKIPPED))
