"""Update steps with edge cases; metrics and gradients of each, sample by sample, in plain PyTorch and float64."""

import tiny
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torchtune import config

from recipe_utils.update_steps.permutation import epoch_permutation

TOLERANCE = 1e-10
NUM_SAMPLES = 19  # no multiple of 16: the last update step holds 3 samples
DATA = {"_component_": "tiny.tiny_dataset", "num_samples": NUM_SAMPLES, "num_without_targets": 3, "mask_prompts": False}
STEP_OF_16 = {"dataset": DATA, "global_batch_size": 16, "gradient_accumulation_steps": ...}
"""Config keys of shuffled update steps of 16 samples, with uneven numbers of targets or none."""
MIXED = [
    {**DATA, "num_samples": 7, "num_without_targets": 1, "seed": 1, "name": "chat", "loss_weight": 0.3},
    {**DATA, "num_samples": 10, "num_without_targets": 1, "seed": 2, "name": "code"},
    {**DATA, "num_samples": 2, "num_without_targets": 1, "seed": 4, "name": "math", "loss_weight": 2},
]  # fmt: skip
"""Three named datasets with as many samples; the third has no target in the last update step."""
HELD_OUT = [
    {**DATA, "num_samples": 5, "num_without_targets": 1, "seed": 5, "name": "code"},
    {**DATA, "num_samples": 4, "num_without_targets": 1, "seed": 6, "name": "else"},
]
"""Two named datasets for validation."""
NUM_PAIRS, PAIRS_PER_STEP = 17, 8  # the last update step holds a single pair
SIDES = ("chosen", "rejected")


def steps_of(samples, size=16, epoch=0):
    """Returns the samples of each update step of a shuffled epoch."""
    order = epoch_permutation(len(samples), epoch, shuffle=True).tolist()
    return [[samples[i] for i in order[n : n + size]] for n in range(0, len(samples), size)]


def samples_of(*datasets):
    """Returns samples of tiny datasets, each with the name and the loss weight of its own."""
    names = ("num_samples", "num_without_targets", "mask_prompts", "seed", "num_common")
    return [
        {**sample, "dataset": data.get("name"), "weight": data.get("loss_weight", 1.0)}
        for data in datasets
        for sample in tiny.make_samples(**{name: data[name] for name in names if name in data})
    ]


def metrics_and_gradients(objective, models, samples, *terms):
    """Returns metrics of one update step, and gradients by parameter name; ``objective`` is a function below."""
    models[0].zero_grad()
    metrics = objective(*models, samples, *terms)
    metrics["loss"].backward()
    metrics = {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in metrics.items()}
    gradients = {n: p.grad.clone() for n, p in models[0].named_parameters() if p.grad is not None}
    return metrics, gradients


def targets_of(model, sample, prefix="", tokens="tokens"):
    """Returns logits of each target of a sample, and the targets."""
    labels = torch.tensor(sample[f"{prefix}labels"])[1:]
    is_target = labels != tiny.IGNORE
    return model(torch.tensor([sample[f"{prefix}{tokens}"]]))[0, :-1][is_target], labels[is_target]


def big_batch(model, samples):
    """Loss and gradients of plain samples."""
    metrics, gradients = metrics_and_gradients(cross_entropy, (model, None), samples)
    return metrics["loss"], gradients


def cross_entropy(model, _, samples, loss_weights="tokens"):
    """Returns the mean over targets, or over the means of datasets, and that of each named dataset."""
    sums, counts, weights = {}, {}, {}
    for sample in samples:
        logits, labels = targets_of(model, sample)
        name = sample.get("dataset")
        sums[name] = sums.get(name, 0) + F.cross_entropy(logits, labels, reduction="sum")
        counts[name] = counts.get(name, 0) + len(labels)
        weights[name] = sample.get("weight", 1.0)
    means = {name: sums[name] / counts[name] for name in sums if counts[name]}
    weights = {n: weights[n] * (counts[n] if loss_weights == "tokens" else 1) for n in means}
    loss = sum(weights[name] * mean for name, mean in means.items()) / sum(weights.values())
    num_tokens = sum(counts.values())
    return {
        "loss": loss,
        "num_tokens": num_tokens,
        **{f"loss/{name}": mean for name, mean in means.items() if name},
        **{f"token_share/{name}": counts[name] / num_tokens for name in counts if name},
    }


def distillation(student, teacher, samples, kd_ratio, temperature, divergence):
    """Returns means over all targets."""
    rows = []
    for sample in samples:
        logits, labels = targets_of(student, sample)
        with torch.no_grad():
            of_teacher, _ = targets_of(teacher, sample)
        common = min(logits.size(1), of_teacher.size(1))
        log_q = F.log_softmax(logits[:, :common] / temperature, dim=-1)
        log_p = F.log_softmax(of_teacher[:, :common] / temperature, dim=-1)
        p, q = log_p.exp(), log_q.exp()
        forward, reverse = (p * (log_p - log_q)).sum(1), (q * (log_q - log_p)).sum(1)
        symmetric = (forward + reverse) / 2
        kd = {"forward": forward, "reverse": reverse, "symmetric": symmetric}[divergence]
        ce = F.cross_entropy(logits, labels, reduction="none")
        agree = (log_q.argmax(1) == log_p.argmax(1)).double()
        loss = (1 - kd_ratio) * ce + kd_ratio * temperature**2 * kd
        rows.append(torch.stack([loss, ce, kd, -(p * log_p).sum(1), agree]))
    names = ("loss", "ce_loss", "kd_loss", "teacher_entropy", "teacher_agreement")
    metrics = dict(zip(names, torch.cat(rows, dim=1).mean(1), strict=True))
    return metrics if kd_ratio < 1 else {n: v for n, v in metrics.items() if n != "ce_loss"}


def answers(model, pair):
    """Returns summed log-probability and number of targets of each side, with one forward each."""
    sums, numbers = [], []
    for side in SIDES:
        logits, labels = targets_of(model, pair, f"{side}_", "input_ids")
        sums.append(-F.cross_entropy(logits, labels, reduction="sum"))
        numbers.append(len(labels))
    return sums, numbers


def preference(policy, reference, pairs, loss, sft_loss_weight):
    """Returns means over the pairs."""
    loss_fn = config.instantiate(OmegaConf.create(loss))
    rows, chosen_sum, num_chosen = [], 0.0, 0
    for pair in map(tiny.without_shared_turns, pairs):
        sums, numbers = answers(policy, pair)
        with torch.no_grad():
            of_reference, _ = answers(reference, pair)
        given = [*sums, *of_reference]
        if getattr(loss_fn, "normalizes_length", False):
            given = [value / number for value, number in zip(given, numbers * 2, strict=True)]
        of_pair, chosen, rejected = (each[0] for each in loss_fn(*(value[None] for value in given)))
        is_accurate = (chosen > rejected).double()
        rows.append(torch.stack([of_pair, chosen, rejected, chosen - rejected, is_accurate, *sums]))
        chosen_sum, num_chosen = chosen_sum + sums[0], num_chosen + numbers[0]
    names = (
        "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "log_probs/chosen",
        "log_probs/rejected",
    )  # fmt: skip
    metrics = dict(zip(names, torch.stack(rows).mean(0), strict=True))
    metrics["loss"] = metrics["loss"] - sft_loss_weight * chosen_sum / num_chosen
    return metrics


def error(gradients, reference):
    """Returns the largest deviation over the reference's largest entry, of the parameters in ``gradients``."""
    scale = max(grad.abs().max().item() for grad in reference.values())
    return max((grad - reference[n]).abs().max().item() for n, grad in gradients.items()) / scale
