# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Writing latents: encoding, shards and their index, and the space of samples that an autoencoder decodes."""
