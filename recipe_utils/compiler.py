"""Settings of PyTorch's compiler for everything that this project compiles."""

import importlib
from typing import Any

_RECOMPILE_LIMIT = 64


def configure_compiler() -> None:
    """Makes compiled functions exact for any float, and compiled for up to 64 variants.

    PyTorch makes inputs of Python floats that change, and its cache on disk then confuses graphs that
    differ in such a constant only (pytorch#194976, pytorch#197889): with another ``kd_ratio``, gradients
    of a distillation were wrong by 0.28. Beyond its limit of 8 variants, PyTorch runs a function
    uncompiled, and flex attention then stores all scores [b, h, s, s], several times per layer.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    config.specialize_float = True
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(getattr(config, name), _RECOMPILE_LIMIT))
