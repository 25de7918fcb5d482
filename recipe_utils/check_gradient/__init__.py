"""Comparison of an update step's gradient with single samples: ``python -m recipe_utils.check_gradient``.

This module contains the components that replace those of the user's config.
"""

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtune import config, training

from recipe_utils.check_gradient.plain import build_plain
from recipe_utils.model_kinds import transformers_decoder
from recipe_utils.parallel.fsdp import local


class GradientRecorder(Optimizer):
    """Optimizer that replaces each weight by its gradient, with the arguments of any other."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.0, **options})
        self.has_stepped = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Replaces the weights; :func:`gather_weights` then gathers gradients."""
        self.has_stepped = True
        for group in self.param_groups:
            for p in group["params"]:
                grad: Any = torch.zeros_like(p) if p.grad is None else p.grad
                if isinstance(p, DTensor):  # tensor parallelism does not shard that of embeddings
                    grad = grad.redistribute(placements=p.placements)
                local(p).copy_(local(grad))


class RandomWeights:
    """Checkpointer of a ``model``'s component with random weights that are exact in any precision."""

    def __init__(self, model: dict[str, Any], seed: int, **_: Any) -> None:
        self._model, self._seed = OmegaConf.create(model), seed
        self._checkpoint_dir = model.get("path")  # of a model of transformers

    def load_checkpoint(self) -> dict[str, Any]:
        """Returns all weights but adapters, by name."""
        like = build_plain(self._model, torch.float32, torch.device("meta")).state_dict()
        names = (name for name in like if ".lora_" not in name and "magnitude" not in name)
        self._generator = torch.Generator().manual_seed(self._seed)
        return {training.MODEL_KEY: {name: self.draw(name, like[name].shape) for name in names}}

    def draw(self, name: str, shape: torch.Size) -> Tensor:
        """Returns a weight of standard deviation 0.02, added to 1 for norms."""
        weight = torch.randn(shape, generator=self._generator) * 0.02
        is_scale = weight.dim() == 1 and not name.endswith("bias")
        return (weight + is_scale).bfloat16()


def first_layers(model: dict[str, Any], num_layers: int) -> nn.Module:
    """Builds a decoder of torchtune and removes all but its first layers."""
    decoder: Any = config.instantiate(OmegaConf.create(model))
    decoder.layers = decoder.layers[:num_layers]
    return decoder


def cut_component(component: Any, whole: Any, folder: Path) -> dict[str, Any]:
    """Returns a component of few layers of a decoder; ``folder`` gets its config if it is of transformers."""
    if transformers_decoder(whole) is None:
        own = {"_component_": "recipe_utils.check_gradient.first_layers", "model": component}
        return {**own, "num_layers": 2}
    from recipe_utils.models.transformers.packing_check import with_few_layers

    with_few_layers(whole.model.config).save_pretrained(folder)
    return {k: v for k, v in component.items() if k != "config"} | {"path": str(folder)}
