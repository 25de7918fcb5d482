"""The end of an update step: gradients are clipped, the optimizer steps with them, the learning rate moves on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from recipe_utils.optim.grad_norm import ModelWithGradients, NameOf, clip_grad_norm_
from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.optim.optimizer import OptimizerSettings, build_lr_scheduler, build_optimizer


class Stepper:
    """Optimizer of a model with its guard against non-finite gradients and its learning-rate schedule.

    ``device`` is that of gradient norms; ``groups`` as in :func:`.build_optimizer`.
    """

    def __init__(
        self,
        cfg: DictConfig,
        model: ModelWithGradients,
        settings: OptimizerSettings,
        device: torch.device,
        groups: Callable[[Mapping[str, nn.Parameter]], list[Any]] | None = None,
    ) -> None:
        self.optimizer = build_optimizer(cfg.optimizer, model.module, settings, groups)
        self.nonfinite = NonfiniteGuard(self.optimizer, device, settings)
        self.lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self._model, self._settings, self._cfg_schedule = model, settings, cfg.get("lr_scheduler")

    def begin(self, num_steps: int, global_step: int) -> None:
        """Builds the schedule of a training of ``num_steps`` update steps, of which ``global_step`` are completed."""
        self.lr_scheduler = build_lr_scheduler(self._cfg_schedule, self.optimizer, num_steps, global_step)

    def clip_and_step(
        self, name_of: NameOf | None = None, should_step: Callable[[Tensor], Tensor | bool] | None = None
    ) -> Tensor | None:
        """Clips gradients, steps along them, sets them to None, and steps the schedule.

        With ``name_of``, the gradients of each name are clipped by their own norm. ``should_step`` maps the norm to a
        condition of the recipe's own, equal on all ranks and on the norm's device; see :meth:`.NonfiniteGuard.should_step`.

        Returns the gradient norm before clipping [], None with ``optimizer_in_bwd``.
        """
        grad_norm = clip_grad_norm_(self._model, self._settings.clip_grad_norm, name_of)
        # Without a norm (``optimizer_in_bwd``) a condition cannot be asked: the guard refuses False.
        also: Tensor | bool = should_step is None
        if should_step is not None and grad_norm is not None:
            also = should_step(grad_norm)
        # Fused optimizers skip non-finite gradients without a device synchronization.
        if self.nonfinite.should_step(grad_norm, also):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return grad_norm
