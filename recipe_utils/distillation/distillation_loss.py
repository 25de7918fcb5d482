"""Combination of a cross-entropy and a divergence into the loss of distillation."""

from typing import Any

from omegaconf import DictConfig
from torch import nn
from torchtune.modules import loss as stock

from recipe_utils.losses.attach import build_loss as build_cross_entropy
from recipe_utils.losses.cross_entropy import LinearCrossEntropyLoss
from recipe_utils.losses.divergences import Kind, LinearDistillationLoss
from recipe_utils.settings.problems import build
from recipe_utils.torchtune_names import IGNORE_INDEX, instantiate
from recipe_utils.training.log import Reported

STUDENT = Reported(metrics=("loss", "teacher_agreement"))
"""Main metrics."""
_STOCK: dict[type, Kind] = {
    stock.ForwardKLLoss: "forward",
    stock.ForwardKLWithChunkedOutputLoss: "forward",
    stock.ReverseKLLoss: "reverse",
    stock.ReverseKLWithChunkedOutputLoss: "reverse",
    stock.SymmetricKLLoss: "symmetric",
    stock.SymmetricKLWithChunkedOutputLoss: "symmetric",
}
_STOCK_CROSS_ENTROPIES = (nn.CrossEntropyLoss, stock.CEWithChunkedOutputLoss, LinearCrossEntropyLoss)


def build_loss(cfg: DictConfig, kd_ratio: float) -> Any:
    """Builds ``loss`` and, with a ``kd_ratio`` above 0, ``kd_loss``, which are one loss then. Raises ConfigError."""
    loss_fn = build("loss", build_cross_entropy, cfg.loss)
    kd_loss_fn = build("kd_loss", instantiate, cfg.get("kd_loss"))
    return build("", make_distillation_loss, loss_fn, kd_loss_fn, kd_ratio) if kd_ratio > 0 else loss_fn


def make_distillation_loss(loss_fn: Any, kd_loss_fn: Any | None, kd_ratio: float) -> LinearDistillationLoss:
    """Combines a cross-entropy, which sets ``ignore_index``, and a divergence of weight ``kd_ratio`` into one loss.

    ``kd_loss_fn`` is a :class:`LinearDistillationLoss` (default), or one of torchtune's six, whose divergence is used,
    without the teacher's entropy that they do not subtract. Raises ValueError for other losses.
    """
    kd_loss_fn = kd_loss_fn or LinearDistillationLoss()
    name = type(loss_fn).__name__
    if not isinstance(loss_fn, _STOCK_CROSS_ENTROPIES):
        raise ValueError(
            f"loss: {name} is no cross-entropy that can be computed along with a divergence; set it to "
            "recipe_utils.losses.LinearCrossEntropyLoss"
        )
    # Both terms are computed from the same logits by formulas without weights of classes.
    smoothing = getattr(loss_fn, "label_smoothing", 0.0)
    if getattr(loss_fn, "weight", None) is not None or smoothing:
        raise ValueError(
            f"loss: {name} with class weights or label_smoothing={smoothing} is no plain cross-entropy; leave both out"
        )
    if not isinstance(kd_loss_fn, LinearDistillationLoss):
        kind = _STOCK.get(type(kd_loss_fn))
        if kind is None:
            raise ValueError(
                f"kd_loss: {type(kd_loss_fn).__name__} is unknown; set it to "
                "recipe_utils.distillation.LinearDistillationLoss, or one of torchtune's KD losses"
            )
        kd_loss_fn = LinearDistillationLoss(
            kind,
            mixture=getattr(kd_loss_fn, "sym_kd_ratio", 0.5),
            num_output_chunks=getattr(kd_loss_fn, "num_output_chunks", 8),
            ignore_index=kd_loss_fn.ignore_index,
        )
    # One label of both: a target of one term is a target of the other.
    ignored = kd_loss_fn.ignore_index
    if ignored not in (IGNORE_INDEX, loss_fn.ignore_index):
        text = f"it has no effect with loss.ignore_index={loss_fn.ignore_index}; remove this key"
        raise ValueError(f"kd_loss.ignore_index={ignored}: {text}")
    kd_loss_fn.ignore_index = loss_fn.ignore_index
    kd_loss_fn.kd_ratio = kd_ratio
    return kd_loss_fn
