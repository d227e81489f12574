# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""LightningDiT (Yao et al. 2025, arXiv 2501.01423): a DiT with RoPE, RMSNorm, SwiGLU and flow matching.

Its time and velocity are ours, with t in [0, 1] in its embedding. It adds the sin-cos table and rotates queries and
keys, both. Which norms and feed-forward layers a model has shows in its tensors.
"""

from __future__ import annotations

from torchditan.checkpoint.weights import Weights
from torchditan.extras.weights.formats.layout import (
    check_position_table,
    check_rope,
    converted,
    drop_variance,
    pad_hidden,
    read_sizes,
    sample_size_of,
)

_COS, _SIN = "feat_rope.freqs_cos", "feat_rope.freqs_sin"


def convert(source: Weights, *, sample_size: tuple[int, int] | None = None, num_heads: int | None = None) -> Weights:
    """Convert a LightningDiT with RoPE, whose table shows the number of heads."""
    tensors = source.tensors()
    rope = {name: tensors.pop(name) for name in (_COS, _SIN)}
    num_patches, head_dim = rope[_COS].shape
    sizes = read_sizes(tensors, num_heads=num_heads or tensors["x_embedder.proj.weight"].shape[0] // head_dim)
    size = sample_size_of(sizes, num_patches, sample_size)
    check_rope(rope, sizes, size)
    norm_type = "rmsnorm" if "final_layer.norm_final.weight" in tensors else "np_layernorm"
    qk_norm = "blocks.0.attn.q_norm.weight" in tensors and norm_type == "rmsnorm"
    mlp = "swiglu" if "blocks.0.mlp.w12.weight" in tensors else "gelu"
    position = "rope_sincos" if "pos_embed" in tensors else "rope"
    notes = [
        "time in [0, 1] (model.timestep_scale 1); t = 1 is data, and the model predicts data - noise, as here",
        f"{norm_type}, {mlp}, queries and keys {'' if qk_norm else 'not '}normalized, positions {position}",
    ]
    if "pos_embed" in tensors:
        check_position_table(tensors["pos_embed"], sizes, size)
    if mlp == "swiglu":
        notes += pad_hidden(tensors, range(sizes.depth), sizes.width)
    notes += drop_variance(tensors, sizes)
    options = {
        "model.preset": "torchditan",
        "model.norm_type": norm_type,
        "model.qk_norm": qk_norm,
        "model.mlp": mlp,
        "model.position": position,
        "model.learn_sigma": False,
        "model.timestep_scale": 1.0,
        "diffusion.objective": "flow_matching",
        "diffusion.timestep_sampling": "logit_normal",
        # The publisher's settings for 800 epochs in VA-VAE latents. Its 250 steps are the points of the grid, and its
        # shift 0.3 moves our way as 1 / 0.3.
        "sampling.sampler": "euler",
        "sampling.num_steps": 249,
        "sampling.timestep_shift": 1 / 0.3,
        "sampling.guidance_scale": 6.7,
        "sampling.guidance_interval": [0.125, 1.0],
        "sampling.guidance_channels": min(3, sizes.channels),
    }
    return converted(source, tensors, sizes, size, options, notes)
