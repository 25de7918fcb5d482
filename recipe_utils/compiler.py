"""Settings of PyTorch's compiler for everything that this project compiles."""

import importlib
from typing import Any

_RECOMPILE_LIMIT = 64
"""Variants per compiled function: row lengths of flex attention, times training and validation, times models."""


def configure_compiler() -> None:
    """Makes compiled functions exact for any float, and compiled once for any length, or for up to 64 variants.

    By default Python floats become inputs of a graph, and PyTorch's cache, also on disk, can return a graph
    that was compiled for another value (pytorch#194976, pytorch#197889): gradients of a distillation with
    ``kd_ratio`` 0.3 after 0.5 were wrong by 0.28. Beyond its limit of 8 variants, PyTorch runs a function
    uncompiled, and flex attention then stores all scores [b, h, s, s], several times per layer. It also takes
    sizes that are equal in the first call for the same in all, such as a row of 4,096 tokens and a width of 4,096.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    shapes: Any = importlib.import_module("torch.fx.experimental._config")
    config.specialize_float = True
    shapes.use_duck_shape = False
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(getattr(config, name), _RECOMPILE_LIMIT))
