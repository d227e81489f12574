# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Process group, mesh, `parallelize`, activation checkpointing, float8, CPU threads.

`parallelize` serves every model. Imports `config` errors and `supervision`; never the trainer or a run's logs.
"""
