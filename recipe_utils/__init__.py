"""What the update-step recipes call.

One module per arrow of the data flow (``sampler`` -> ``samples`` -> ``plan`` -> ``collate`` ->
``count`` -> ``prefetch``, put together in ``update_steps``), and one for each thing around the loop
(``parallelism``, ``model``, ``loss``, ``optimizer``, ``metrics``, ``profiler``, ``config_checks``).
Functions take plain arguments and return plain torch objects; none of them reads a config.

This file imports nothing: PyTorch's start-up calls :mod:`recipe_utils.tune.registry` at every
``import torch`` of the environment.
"""

__version__ = "0.1.0"
