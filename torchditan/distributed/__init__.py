# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Process group, device mesh, `parallelize`, checkpointing, compile, context parallelism, float8, CPU threads.

May import: config, models, registry, run.
"""
