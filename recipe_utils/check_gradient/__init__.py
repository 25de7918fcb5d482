"""Comparison of an update step's gradient with single samples: ``python -m recipe_utils.check_gradient``.

This module contains the components that replace those of the user's config.
"""

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from recipe_utils.models.adapters.nf4 import without_quantizing
from recipe_utils.parallel.fsdp import local
from recipe_utils.torchtune_names import MODEL_KEY, instantiate, set_default_dtype


class GradientRecorder(Optimizer):
    """Optimizer that moves each weight along its gradient or, once it ``records``, replaces it by its gradient.

    It has the arguments of any other. A step moves a tensor by about 1 % of itself, so that B of LoRA is 0 no more.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.0, **options})
        self.records, self.num_steps = False, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Changes the weights; :func:`.gather_weights` then gathers them, or gradients."""
        self.num_steps += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            grad: Any = torch.zeros_like(p) if p.grad is None else p.grad
            if isinstance(p, DTensor):  # tensor parallelism does not shard that of embeddings
                grad = grad.redistribute(placements=p.placements)
            own, grad = local(p), local(grad)
            if self.records:
                own.copy_(grad)
            else:
                length = 1e-3 * own.numel() ** 0.5 + 0.01 * own.double().norm().item()
                own.sub_(grad, alpha=length / (grad.double().norm().item() or 1))


def on_meta(component: Any) -> Any:
    """Builds a model on the meta device; weights that it quantizes are plain."""
    with set_default_dtype(torch.float32), torch.device("meta"), without_quantizing():
        return instantiate(component)


class RandomWeights:
    """Checkpointer of a ``model``'s component with random weights that are exact in any precision.

    Their standard deviation is 0.02, and they are added to 1 for norms. They are drawn on ``device``, and depend on
    its type.
    """

    def __init__(self, model: dict[str, Any], seed: int, device: str = "cpu", **_: Any) -> None:
        self._model, self._seed, self._device = OmegaConf.create(model), seed, device
        self._checkpoint_dir = model.get("path")  # of a model of transformers

    def load_checkpoint(self) -> dict[str, Any]:
        """Returns all weights but adapters, by name."""
        generator, weights = torch.Generator(self._device).manual_seed(self._seed), dict[str, Tensor]()
        for name, like in on_meta(self._model).state_dict().items():
            if ".lora_" not in name and "magnitude" not in name:
                drawn = torch.randn(like.shape, generator=generator, device=self._device, dtype=torch.float32) * 0.02
                is_scale = like.dim() == 1 and not name.endswith("bias")
                weights[name] = (drawn + is_scale).bfloat16().cpu()
        return {MODEL_KEY: weights}


def first_layers(model: dict[str, Any], num_layers: int) -> nn.Module:
    """Builds a decoder of torchtune and removes all but its first layers."""
    decoder: Any = instantiate(OmegaConf.create(model))
    decoder.layers = decoder.layers[:num_layers]
    return decoder
