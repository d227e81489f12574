# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Mochi's attention over valid tokens only equals the one with a mask."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from debugmodels import built, inputs_of, spec_of
from emulated_gpu import skip_if_emulated
from torch import Tensor

pytest.importorskip("diffusers")

from torchditan.extras.published import mochi
from torchditan.extras.published.mochi import attend_by_sequences, attend_with_mask


class Kernel:
    """What `varlen_attn` computes, one sequence after the other; torch has it for GPUs only."""

    def __init__(self) -> None:
        self.num_pairs = 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int
    ) -> Tensor:
        assert ends_q.dtype == torch.int32
        ends = ends_q.tolist()
        assert ends == ends_k.tolist()
        assert (ends[0], ends[-1]) == (0, len(q)), "every token is in a sequence, so every result is defined"
        out = []
        for start, end in itertools.pairwise(ends):
            assert 0 <= end - start <= min(max_q, max_k)
            self.num_pairs += (end - start) ** 2
            rows = (tensor[start:end].transpose(0, 1)[None] for tensor in (q, k, v))  # (1, heads, n, D)
            if end > start:
                out.append(F.scaled_dot_product_attention(*rows)[0].transpose(0, 1))
        return torch.cat(out)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(mochi, "varlen_attn", kernel)
    return kernel


NUM_VIDEO, NUM_TEXT = 20, 7
VALID = [7, 0, 3]


def test_valid_tokens_get_the_same_results_and_gradients_without_the_work_for_padding(kernel: Kernel) -> None:
    generator = torch.Generator().manual_seed(0)
    text_mask = torch.arange(NUM_TEXT) < torch.tensor(VALID)[:, None]
    seen = F.pad(text_mask, (NUM_VIDEO, 0), value=True)
    weight = torch.randn(3, NUM_VIDEO + NUM_TEXT, 2, 8, generator=generator) * seen[..., None, None]
    inputs = [torch.randn(weight.shape, generator=generator, requires_grad=True) for _ in range(3)]
    results = []
    for attend in (attend_with_mask, attend_by_sequences):
        out = attend(*inputs, text_mask)
        results.append([out * seen[..., None, None], *torch.autograd.grad((out * weight).sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert kernel.num_pairs == sum((NUM_VIDEO + n) ** 2 + (NUM_TEXT - n) ** 2 for n in VALID)


def test_the_prediction_is_that_of_the_mask(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("mochi")
    model: Any = built(spec)
    x_t, t, cond = inputs_of(spec)
    cond["prompt_attention_mask"] = torch.arange(8) < torch.tensor([[3], [0]])
    with torch.no_grad():
        expected = model(x_t, t, cond)
        assert kernel.num_pairs == 0, "without a GPU a mask hides the padding"
        # As on a GPU.
        monkeypatch.setattr(mochi, "attend_with_mask", attend_by_sequences)
        found = model(x_t, t, cond)
    assert kernel.num_pairs > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_the_kernel_of_a_gpu_agrees_with_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mochi.has_varlen_kernel()
    generator = torch.Generator("cuda").manual_seed(0)
    text_mask = torch.arange(NUM_TEXT, device="cuda") < torch.tensor(VALID, device="cuda")[:, None]
    seen = F.pad(text_mask, (NUM_VIDEO, 0), value=True)[..., None, None]
    shape = (3, NUM_VIDEO + NUM_TEXT, 2, 64)
    inputs = [torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    results = []
    for attend in (attend_with_mask, attend_by_sequences):
        out = attend(*inputs, text_mask) * seen
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    skip_if_emulated()
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
