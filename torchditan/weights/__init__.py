# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Weights outside checkpoints: export, import, and opening a trained run (trained_model.py).

May import: autoencoders, checkpoint, config, diffusion, distributed, evaluation, finetune, job, latents, models,
registry, run.
"""
