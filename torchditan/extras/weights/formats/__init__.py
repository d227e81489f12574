# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoints of other projects, converted to our names and conventions. One module per format (registry.FORMATS).

A format is a function `convert(source: Weights, **given) -> Weights`. `source` has the tensors as stored, read by
foreign_files.py; of a folder of diffusers also its path, and config.json as `content`. The keyword arguments are its
options: those of `IMPORT_OPTIONS` are flags, and others follow the name of the format. The result, from
`layout.converted`, has our names, and the options with which our model and samplers compute what the project's own code
computes. A ConfigError continues the path of the file, "has no ...", or names an option.
"""

IMPORT_OPTIONS = ("num_heads", "sample_size", "noise_schedule", "prediction")
"""What the user states because some files do not contain it, with `torchditan import --num_heads` and so on."""
