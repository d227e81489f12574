# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Measures of generated images, and the cards that say how to repeat them.

`torchditan evaluate` reads, in this order: evaluation_run.py chooses what to draw and to compute, evaluator.py shows
pictures to the metrics, sample_parts.py draws them, and card.py writes the figures. A run in training takes
during_training.py instead of the first.
"""

DEFAULT_METRICS = ("effnet", "classifier")
"""Of torchditan evaluate: those that the run and the number of samples allow."""
NUM_SAMPLES = 2600
"""More than twice the 1,280 features of EfficientNet-Lite0, so that both halves have a full-rank covariance."""
