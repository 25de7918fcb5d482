"""Gradients of single samples in plain PyTorch: the reference of :mod:`recipe_utils.check_gradient`.

A dataset's item becomes tokens [s], the unchanged model of torchtune or transformers computes their
logits [s, v], and a loss is written out below: no padding, packing, plan, ranks, attention or loss
module of this project.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune import config, training
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules.low_precision import FrozenNF4Linear
from torchtune.modules.peft import disable_adapter
from torchtune.training.precision import PRECISION_STR_TO_DTYPE

from recipe_utils.checkpoint.peft import load_checkpoint
from recipe_utils.model_kinds import transformers_decoder
from recipe_utils.models.adapters.nf4 import without_quantizing

Gradients = Mapping[str, Tensor]

CROSS_ENTROPIES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")
"""Losses of tokens that are compared."""


class Precision(NamedTuple):
    """Device, and names of precisions as in configs."""

    device: torch.device
    forward: str
    sums: str
    """Precision in which gradients of samples are summed."""
    teacher: str


def build_plain(component: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a model as its library builds it, with plain weights in place of NF4."""
    with training.set_default_dtype(dtype), device, without_quantizing():
        model = config.instantiate(component)
    for module in model.modules():
        if isinstance(module, FrozenNF4Linear):
            module.forward = nn.Linear.forward.__get__(module)
        if hasattr(module, "_quantize_base"):
            module._quantize_base = False
    if transformers_decoder(model) is not None:  # of transformers: its own attention, modules and masks again
        for module in model.model.modules():
            if type(module).__name__ in model.proof.modules:
                vars(module).pop("forward", None)
        model.model.set_attn_implementation("sdpa" if model.model._supports_sdpa else "eager")
    remove_dropout(model)
    return model


def remove_dropout(model: nn.Module) -> float:
    """Sets all rates of dropout to 0, in place. Returns the largest one before."""
    largest = 0.0
    for module in model.modules():
        names = ["attn_dropout", "attention_dropout"]
        for name in [*names, *(["p"] if isinstance(module, nn.Dropout) else [])]:
            if isinstance(rate := getattr(module, name, None), float):
                largest = max(largest, rate)
                setattr(module, name, 0.0)
    return largest


def logits_of(model: Any, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Returns logits [s, v], at least fp32, of tokens [s]."""
    own = {} if positions is None else {"input_pos": positions[None]}
    if transformers_decoder(model) is not None:
        own = {} if positions is None else {"position_ids": positions[None]}
        logits = model.model(input_ids=tokens[None], use_cache=False, **own).logits
    else:
        logits = model(tokens[None], **own)
    logits = torch.cat(logits, dim=1) if isinstance(logits, list) else logits
    return logits[0].to(torch.promote_types(logits.dtype, torch.float32))


class Step(NamedTuple):
    """Update step whose gradient is compared."""

    cfg: DictConfig
    items: Sequence[tuple[int, Mapping[str, Any]]]
    """Position of its dataset in a mixture, and an item as the dataset returns it."""
    loss_weights: Sequence[float] | None
    """Weights of the datasets of a mixture."""
    weights: Mapping[str, Tensor]
    """All weights before the update step, by exported names."""
    gradients: Gradients
    """On rank 0, those of the recipe, by exported names."""
    totals: Mapping[str, float]
    layout: Sequence[str]
    """Plan of microbatches, and the attention kernel of packed rows."""


def gradients_of(step: Step, objective: Any, precision: Precision) -> dict[str, Tensor]:
    """Returns the gradient of each trained parameter on the CPU, a backward for each sample."""
    model = load(step.cfg.model, step.weights, precision)
    parameters = {n: p for n, p in model.named_parameters() if n in step.gradients}
    model.requires_grad_(False)
    sums_dtype = PRECISION_STR_TO_DTYPE[precision.sums]
    sums = {n: torch.zeros_like(p, dtype=sums_dtype) for n, p in parameters.items()}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    for loss in objective(step, model, precision):
        loss.backward()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad.to(sums_dtype)
                parameter.grad = None
    return {name: gradient.cpu() for name, gradient in sums.items()}


def load(component: Any, weights: Mapping[str, Tensor], precision: Precision) -> Any:
    """Returns a plain model with given weights."""
    model = build_plain(component, PRECISION_STR_TO_DTYPE[precision.forward], precision.device)
    model.load_state_dict(dict(weights))
    return model


def _frozen(cfg: DictConfig, key: str, component: Any, precision: Precision) -> Any:
    """Returns a plain model with the weights of the checkpointer at ``key``."""
    weights = config.instantiate(cfg[key]).load_checkpoint()[training.MODEL_KEY]
    return load(component, weights, precision)


# ---- Objectives: yield the loss of each sample, a part of the update step's ----------------------


def _documents(item: Mapping[str, Any], ignored: int, device: torch.device, has_weights: bool) -> Iterator[Any]:
    """Yields tokens, labels and weights of the next tokens, and positions of an item's documents with targets."""
    tokens, labels = (torch.as_tensor(item[key], device=device) for key in ("tokens", "labels"))
    weights = torch.ones(len(labels), dtype=torch.float64, device=device)
    if has_weights and "weights" in item:
        weights = torch.as_tensor(item["weights"]).to(weights)
    lengths = torch.as_tensor(item.get("seq_lens", [len(tokens)])).tolist()
    positions = [None] * len(lengths)
    if "input_pos" in item:  # a packed dataset, which may have cut a document in two
        positions = torch.as_tensor(item["input_pos"], device=device).split(lengths)
    columns = (tensor.split(lengths) for tensor in (tokens, labels, weights))
    for of_tokens, of_labels, of_weights, at in zip(*columns, positions, strict=True):
        if (of_labels[1:] != ignored).any():
            yield of_tokens, of_labels[1:], of_weights[1:], at


def losses_of_texts(step: Step, model: Any, precision: Precision) -> Iterator[Tensor]:
    """Yields each document's part of the loss per target token, with weights of targets and datasets, and a teacher."""
    cfg, loss_fn = step.cfg, config.instantiate(step.cfg.loss)
    ignored, smoothing = loss_fn.ignore_index, getattr(loss_fn, "label_smoothing", 0.0)
    ratio = cfg.get("kd_ratio", 0.5) if "teacher_model" in cfg else 0.0
    if ratio:
        in_dtype = precision._replace(forward=precision.teacher)
        teacher = _frozen(cfg, "teacher_checkpointer", cfg.teacher_model, in_dtype)
        divergence = _divergence(cfg.get("kd_loss") or {})
    documents, counts, device = [], dict[int, float](), precision.device
    for which, item in step.items:
        for document in _documents(item, ignored, device, "weights" in step.totals):
            documents.append((which, document))
            counts[which] = counts.get(which, 0) + document[2][document[1] != ignored].sum().item()
    factors = {which: step.loss_weights[which] if step.loss_weights else 1.0 for which in counts}
    if cfg.get("loss_weights") == "datasets":
        factors = {which: factor / (counts[which] or 1) for which, factor in factors.items()}
    total = sum(factors[which] * counts[which] for which in counts)
    for which, (tokens, labels, weights, positions) in documents:
        logits, is_target = logits_of(model, tokens, positions)[:-1], labels != ignored
        logits, labels = logits[is_target], labels[is_target]
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        loss = (weights[is_target].to(losses) * losses).sum()
        if ratio:
            with torch.no_grad():
                of_teacher = logits_of(teacher, tokens, positions)[:-1][is_target]
            loss = (1 - ratio) * loss + ratio * divergence(logits, of_teacher).sum()
        yield loss * (factors[which] / total)


def _divergence(kd_loss: Mapping[str, Any]) -> Any:
    """Returns a function of logits of student and teacher, [n, v] each, with T^2 D of each row [n]."""
    name = kd_loss.get("_component_", "LinearDistillationLoss").rpartition(".")[2].lower()
    kinds = ("forward", "reverse", "symmetric")  # torchtune's losses begin with them
    kind = next(filter(name.startswith, kinds), kd_loss.get("divergence", "forward"))
    part = kd_loss.get("mixture", kd_loss.get("sym_kd_ratio", 0.5))
    part = {"forward": 1.0, "reverse": 0.0}.get(kind, part)
    own, others = kd_loss.get("temperature", 1.0), kd_loss.get("teacher_temperature")

    def divergence(logits: Tensor, of_teacher: Tensor) -> Tensor:
        common = min(logits.size(1), of_teacher.size(1))
        log_q = F.log_softmax(logits[:, :common] / own, dim=1)
        log_p = F.log_softmax(of_teacher[:, :common].to(logits) / (others or own), dim=1)
        p, q = log_p.exp(), log_q.exp()
        to_q, to_p = log_q, log_p
        if kind == "js":
            to_q = to_p = (part * p + (1 - part) * q).log()
        each = part * p * (log_p - to_q) + (1 - part) * q * (log_q - to_p)
        return each.sum(1) * (own**2 if others is None else 1.0)

    return divergence


def losses_of_pairs(step: Step, model: Any, precision: Precision) -> Iterator[Tensor]:
    """Yields the configured preference loss per pair, and the likelihood of chosen answers per target."""
    cfg, loss_fn = step.cfg, config.instantiate(step.cfg.loss)
    sft_weight = cfg.get("sft_loss_weight", 0.0)
    needs_reference = getattr(loss_fn, "needs_reference", True)
    reference, switched_off = model, disable_adapter
    given = cfg.checkpointer.get("adapter_checkpoint")
    if needs_reference and (given or not any("lora_" in name for name in step.gradients)):
        switched_off = nullcontext
        loaded = load_checkpoint(config.instantiate(cfg.checkpointer), cfg.checkpointer) if given else {}
        start = {**step.weights, **loaded.get(training.ADAPTER_KEY, {})}
        reference = load(cfg.model, start, precision)
        if cfg.get("ref_checkpointer") is not None:
            reference = _frozen(cfg, "ref_checkpointer", cfg.model, precision)
    num_chosen = sum(_num_targets(item["chosen_labels"]) for _, item in step.items)

    def log_prob(of: Any, item: Mapping[str, Any], side: str) -> Tensor:
        keys = (f"{side}_input_ids", f"{side}_labels")
        tokens, labels = (torch.as_tensor(item[key], device=precision.device) for key in keys)
        logits = logits_of(of, tokens)[:-1]
        found: Tensor = -F.cross_entropy(logits, labels[1:], ignore_index=CROSS_ENTROPY_IGNORE_IDX, reduction="sum")
        return found

    for _, item in step.items:
        sides = ("chosen", "rejected")
        policy = [log_prob(model, item, side) for side in sides]
        own = [torch.zeros_like(each) for each in policy]
        if needs_reference:
            with torch.no_grad(), switched_off(reference):
                own = [log_prob(reference, item, side) for side in sides]
        given = [*policy, *own]
        if getattr(loss_fn, "normalizes_length", False):
            sizes = [_num_targets(item[f"{side}_labels"]) for side in sides] * 2
            given = [each / size for each, size in zip(given, sizes, strict=True)]
        loss = loss_fn(*(each[None] for each in given))[0].sum() / len(step.items)
        yield loss - sft_weight * policy[0] / num_chosen


def _num_targets(labels: Any) -> int:
    return int((torch.as_tensor(labels)[1:] != CROSS_ENTROPY_IGNORE_IDX).sum())
