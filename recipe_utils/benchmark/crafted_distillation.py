"""Update steps of text that are hard, and the loss of a student on them computed with whole logits."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchtune import config as torchtune_config
from torchtune import training

from recipe_utils.benchmark.exactness import CraftedDataset, one_padded_batch
from recipe_utils.benchmark.start_adapters import load_start
from recipe_utils.data.loader.samples import Sample


class CraftedDistillation(CraftedDataset):
    """The samples of :data:`recipe_utils.benchmark.exactness.CASES`, for a student and its teacher."""

    _teacher: nn.Module | None = None

    def loss(self, model: nn.Module, samples: Sequence[Sample], config: DictConfig) -> Tensor:
        """Mean over all targets of (1 - r) CE + r KL(teacher || student), in plain PyTorch, in fp64 [nats]."""
        device = next(model.parameters()).device
        if self._teacher is None:
            self._teacher = _teacher(config, device)
        tokens, targets = (each.to(device) for each in one_padded_batch(samples))
        is_target = targets != torchtune_config.instantiate(config.loss).ignore_index
        with torch.no_grad():
            log_p = F.log_softmax(self._teacher(tokens)[:, :-1][is_target].double(), dim=-1)
        logits = model(tokens)[:, :-1][is_target].double()
        divergence = F.kl_div(
            F.log_softmax(logits, dim=-1), log_p, reduction="batchmean", log_target=True
        )
        ce_loss = F.cross_entropy(logits, targets[is_target])
        return torch.lerp(ce_loss, divergence, float(config.get("kd_ratio", 0.5)))


def _teacher(config: DictConfig, device: torch.device) -> nn.Module:
    """The frozen model in fp64, with weights of the config's precision."""
    with training.set_default_dtype(torch.float64), device:
        teacher: nn.Module = torchtune_config.instantiate(config.teacher_model)
    of_teacher = OmegaConf.create({"checkpointer": config.teacher_checkpointer})
    load_start(teacher, of_teacher, rounded_to=training.get_dtype(config.dtype, device=device))
    return teacher.requires_grad_(False)
