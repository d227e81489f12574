# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Latents on disk and on the device: shards, their index and writer, encoding, and the space a model is trained in.

sample_space.py is the interface for pixels and latents alike; the rest is imported only by jobs on latents.
Imports `autoencoders`, `data_stream` and `weights.safetensors_files`.
"""
