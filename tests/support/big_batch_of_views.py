"""Update steps of self-distillation in plain PyTorch and float64, with all images as one batch.

Follows the papers' definitions and not the recipe: crops are forwarded one by one, Sinkhorn-Knopp scales the whole
matrix of targets, every pair of crops has its own cross-entropy.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from tiny import tiny_images
from torch import Tensor
from torchtune import config as torchtune_config

from recipe_utils.dinov3.backbone import fresh_vit_weights, with_heads
from recipe_utils.dinov3.images.crop_rows import layout_of
from recipe_utils.dinov3.images.views import Views, ViewSettings
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.permutation import epoch_permutation

NUM_IMAGES, IMAGES_PER_STEP = 37, 16  # the last update step holds 5 images
MODEL = {
    "_component_": "recipe_utils.dinov3.dinov3_vit",
    "patch_size": 4,
    "num_channels": 1,
    "embed_dim": 16,
    "num_layers": 4,
    "num_heads": 2,
    "num_registers": 1,
    "layer_scale_init": 0.7,
    "drop_path": 0.25,
}
HEAD = {"num_prototypes": 12, "hidden_dim": 10, "bottleneck_dim": 6}
TRANSFORM = {
    "_component_": "recipe_utils.dinov3.MultiCrop",
    "global_crop_size": 12,
    "local_crop_size": 8,
    "num_local_crops": 3,
    "blur_probability": [0.0, 0.0, 0.0],
    "mean": [0.3],
    "std": [0.4],
}
LR, MOMENTUM, EMA_MOMENTUM, STUDENT_T, TEACHER_T = 0.3, 0.9, 0.6, 0.1, 0.07
ROPE_RESCALE = 2.0
WEIGHTS = {"dino": 0.9, "ibot": 0.8, "koleo": 0.3, "gram": 0.5}


class Reference(NamedTuple):
    """Results of each update step, and at the end."""

    metrics: list[dict[str, float]]
    gradients: list[dict[str, Tensor]]
    student: dict[str, Tensor]
    teacher: dict[str, Tensor]


def step_of_16(tiny_config: Any, **changes: Any) -> dict[str, Any]:
    """Returns a config of the update steps below, for :func:`recipe_runs.run_recipe_recording_gradients`."""
    base = tiny_config()
    kept = ("output_dir", "metric_logger", "device", "process_group_timeout_seconds")
    return {
        **{key: base[key] for key in kept},
        "model": MODEL,
        "dino_head": HEAD,
        "ibot_head": HEAD,
        "transform": TRANSFORM,
        "dataset": {"_component_": "tiny.tiny_images", "num_images": NUM_IMAGES},
        "checkpointer": {
            "_component_": "recipe_utils.dinov3.DINOv3Checkpointer",
            "model": "${model}",
            "checkpoint_dir": None,
            "output_dir": base["output_dir"],
            "image_mean": TRANSFORM["mean"],
            "image_std": TRANSFORM["std"],
        },
        "optimizer": {"_component_": "tiny.RecordingSGD", "lr": LR, "momentum": MOMENTUM},
        "global_batch_size": IMAGES_PER_STEP,
        "koleo_group_size": 2,
        **{f"{term}_loss_weight": weight for term, weight in WEIGHTS.items()},
        "gram_teacher_every_n_steps": 2,
        "ema_momentum": EMA_MOMENTUM,
        "mask_ratio": [0.1, 0.6],
        "rope_rescale": ROPE_RESCALE,
        "dtype": "fp64",
        "seed": 0,
        **changes,
    }


def reference(group_size: int | None, num_steps: int | None = None, without: str | None = None) -> Reference:
    """Returns the first ``num_steps`` update steps of an epoch (None: all of them).

    ``group_size`` is KoLeo's; None for all images of an update step. ``without`` omits a term of ``WEIGHTS``,
    ``drop path`` or ``rescaled positions``.
    """
    weights = {name: weight * (name != without) for name, weight in WEIGHTS.items()}
    make = partial(with_heads, partial(torchtune_config.instantiate, OmegaConf.create(MODEL)), HEAD, HEAD)
    student, teacher, gram_teacher = make().double(), make().double(), make().double()
    for model in (student, teacher, gram_teacher):
        model.load_state_dict(fresh_vit_weights(student, seed=0))
    optimizer = torch.optim.SGD(student.parameters(), lr=LR, momentum=MOMENTUM)
    transform = torchtune_config.instantiate(OmegaConf.create(TRANSFORM))
    settings = ViewSettings(transform=TRANSFORM, mask_ratio=[0.1, 0.6], rope_rescale=ROPE_RESCALE)
    views = Views(tiny_images(NUM_IMAGES), transform, settings, layout_of(student), 0)
    order = epoch_permutation(NUM_IMAGES, 0, shuffle=True).tolist()
    all_metrics, all_gradients = [], []
    for step, start in enumerate([*range(0, NUM_IMAGES, IMAGES_PER_STEP)][:num_steps]):
        window = order[start : start + IMAGES_PER_STEP]
        samples = [views[StepIndex(index, 0, step, position, len(window))] for position, index in enumerate(window)]
        for sample in samples:
            if without == "drop path":
                sample["draws"] = [None] * len(sample["draws"])
            if without == "rescaled positions":
                sample["position_factor"] = 1.0
        metrics = _metrics(samples, student, teacher, gram_teacher, group_size, weights)
        optimizer.zero_grad()
        metrics["loss"].backward()
        all_metrics.append({name: value.item() for name, value in metrics.items()})
        all_gradients.append({name: p.grad.clone() for name, p in student.named_parameters()})
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.copy_(EMA_MOMENTUM * mine + (1 - EMA_MOMENTUM) * its)
        if (step + 1) % 2 == 0:
            gram_teacher.load_state_dict(teacher.state_dict())
    return Reference(all_metrics, all_gradients, student.state_dict(), teacher.state_dict())


def _states(model: Any, factor: float, crop: Any, mask: Any = None, draws: Any = None) -> tuple[Tensor, Tensor]:
    """Returns the class state [d] and patch states [P, d] of a crop [c, h, h]; ``factor`` scales positions."""
    patch, num_registers = MODEL["patch_size"], MODEL["num_registers"]
    pixels = F.unfold(torch.as_tensor(crop)[None], patch, stride=patch)[0].T  # [P, c * p * p]
    side = crop.shape[-1] // patch
    kinds = torch.zeros(len(pixels)) if mask is None else torch.as_tensor(mask).float()
    special = torch.tensor([2.0] + [3.0 + r for r in range(num_registers)])
    tokens = torch.zeros(len(special) + len(pixels), 1 + pixels.size(1))
    tokens[:, 0] = torch.cat([special, kinds])
    tokens[len(special) :, 1:] = pixels
    centers = factor * (2 * (torch.arange(side).double() + 0.5) / side - 1)
    centers = centers.float()  # as crops are
    positions = torch.zeros(len(tokens), 2)
    positions[len(special) :] = torch.cartesian_prod(centers, centers)
    if draws is not None:
        positions = torch.cat([positions, torch.as_tensor(draws).expand(len(tokens), -1)], dim=1)
    (states,) = model(tokens[None], input_pos=positions[None])
    return states[0], states[len(special) :]


def _sinkhorn(logits: Tensor) -> Tensor:
    """Returns targets [n, k]: rows and columns of exp(logits / t) scaled in turn."""
    targets = torch.exp(logits / TEACHER_T)
    for _ in range(3):
        targets = targets / targets.sum(0, keepdim=True)
        targets = targets / targets.sum(1, keepdim=True)
    return targets


def _cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    return -(target * F.log_softmax(logits / STUDENT_T, dim=-1)).sum(-1)


def _logits(head: Any, states: Tensor) -> Tensor:
    """Returns logits [n, k] of states [n, d]."""
    logits: Tensor = head.prototypes(head(states))
    return logits


def _metrics(
    samples: list[dict[str, Any]],
    student: Any,
    teacher: Any,
    gram_teacher: Any,
    group_size: int | None,
    weights: dict[str, float],
) -> dict[str, Tensor]:
    with torch.no_grad():
        of_teacher, of_gram = (
            [[_states(model, s["position_factor"], crop) for crop in s["global_crops"]] for s in samples]
            for model in (teacher, gram_teacher)
        )
        cls_states = torch.stack([cls for image in of_teacher for cls, _ in image])
        crop_targets = _sinkhorn(_logits(teacher.output.dino, cls_states)).view(len(samples), 2, -1)
        masked = [
            _logits(teacher.output.ibot, patches[torch.as_tensor(mask)])
            for sample, image in zip(samples, of_teacher, strict=True)
            for mask, (_, patches) in zip(sample["masks"], image, strict=True)
        ]
        patch_targets = _sinkhorn(torch.cat(masked)).split([len(each) for each in masked])
    local, of_global, ibot, gram, embeddings = [], [], [], [], []
    for i, sample in enumerate(samples):
        draws, factor = sample["draws"], sample["position_factor"]
        seen = [_states(student, factor, sample["global_crops"][c], sample["masks"][c], draws[c]) for c in (0, 1)]
        small = [_states(student, factor, crop, None, draws[2 + j]) for j, crop in enumerate(sample["local_crops"])]
        dino = _logits(student.output.dino, torch.stack([cls for cls, _ in seen + small]))
        pairs = [(v, t) for t in (0, 1) for v in range(len(dino)) if v != t]
        terms = {(v, t): _cross_entropy(crop_targets[i, t], dino[v]) for v, t in pairs}
        of_global.append(torch.stack([value for (v, _), value in terms.items() if v < 2]).mean())
        local.append(torch.stack([value for (v, _), value in terms.items() if v >= 2]).mean())
        of_masked = []
        for c in (0, 1):
            mask = torch.as_tensor(sample["masks"][c])
            if mask.any():
                logits = _logits(student.output.ibot, seen[c][1][mask])
                of_masked.append(_cross_entropy(patch_targets[2 * i + c], logits).mean())
        ibot.append(sum(of_masked, torch.zeros(())) / 2)
        for c in (0, 1):
            mine, its = (F.normalize(x, dim=-1) for x in (seen[c][1], of_gram[i][c][1]))
            gram.append(F.mse_loss(mine @ mine.T, its @ its.T))
        embeddings.append(torch.stack([cls for cls, _ in seen]))
    koleo = []
    size = group_size or len(samples)
    for first in range(0, len(samples), size):
        group = F.normalize(torch.stack(embeddings[first : first + size]), dim=-1)
        for c in (0, 1):
            distances = (group[:, None, c] - group[None, :, c]).square().sum(-1)
            distances = distances + torch.diag(torch.full((len(group),), 100.0))
            if len(group) > 1:
                koleo.append(-(distances.min(1).values.sqrt() + 1e-8).log() / 2)
    means = {
        "dino_local_loss": torch.stack(local).mean(),
        "dino_global_loss": torch.stack(of_global).mean(),
        "ibot_loss": torch.stack(ibot).mean(),
        "koleo_loss": torch.cat(koleo).sum() / len(samples),
        "gram_loss": torch.stack(gram).mean(),
        "target_entropy": -(crop_targets * crop_targets.log()).sum(-1).mean(),
    }
    num_local = len(samples[0]["local_crops"])
    dino = num_local * means["dino_local_loss"] + means["dino_global_loss"]
    means["loss"] = weights["dino"] * dino / (num_local + 1) + sum(
        weights[name] * means[f"{name}_loss"] for name in ("ibot", "koleo", "gram")
    )
    return means
