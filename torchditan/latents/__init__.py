# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Latents: shards on disk, their index and writer, encoding, and the space that a model is trained in.

sample_space.py is the interface for pixels and latents; only jobs on latents import the rest.

May import: autoencoders, config, data_stream, distributed, run, weights.
"""

PUBLIC_FILE = "imagenet_ci8x8.safetensors"
"""ImageNet in the latents of the Cosmos tokenizer CI8x8, a public file."""
