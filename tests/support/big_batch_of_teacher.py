"""Update steps of a distillation, and the gradients of each as one big batch in plain PyTorch and float64."""

import tiny
import torch
import torch.nn.functional as F
from big_batch import NUM_SAMPLES, STEP_OF_16

from recipe_utils.data.loader.sampler import epoch_permutation

NAMES = ("loss", "ce_loss", "kd_loss", "teacher_entropy", "teacher_agreement")
TEACHERS = {"tied": tiny.TEACHER_MODEL, "untied": tiny.UNTIED_TEACHER_MODEL}
STUDENTS = {"tied": tiny.DEEP_MODEL, "untied": tiny.DEEP_UNTIED_MODEL}


def divergence_of(kind, log_q, log_p):
    """Of each row, in the definitions' own words."""
    p, q = log_p.exp(), log_q.exp()
    forward, reverse = (p * (log_p - log_q)).sum(1), (q * (log_q - log_p)).sum(1)
    if kind == "symmetric":
        return (forward + reverse) / 2
    return forward if kind == "forward" else reverse


def metrics_and_gradients(student, teacher, samples, kd_ratio, temperature, divergence="forward"):
    """Means over all target tokens, and the gradient by parameter name; a forward for each sample."""
    student.zero_grad()
    rows = []
    for sample in samples:
        tokens, labels = torch.tensor([sample["tokens"]]), torch.tensor(sample["labels"])[1:]
        is_target = labels != tiny.IGNORE
        logits = student(tokens)[0, :-1][is_target]
        with torch.no_grad():
            of_teacher = teacher(tokens)[0, :-1][is_target]
        common = min(logits.size(1), of_teacher.size(1))
        log_q = F.log_softmax(logits[:, :common] / temperature, dim=-1)
        log_p = F.log_softmax(of_teacher[:, :common] / temperature, dim=-1)
        ce = F.cross_entropy(logits, labels[is_target], reduction="none")
        kd = divergence_of(divergence, log_q, log_p)
        loss = (1 - kd_ratio) * ce + kd_ratio * temperature**2 * kd
        agree = (log_q.argmax(1) == log_p.argmax(1)).double()
        rows.append(torch.stack([loss, ce, kd, -(log_p.exp() * log_p).sum(1), agree]))
    means = torch.cat(rows, dim=1).mean(1)
    means[0].backward()
    gradients = {n: p.grad.clone() for n, p in student.named_parameters() if p.requires_grad}
    return dict(zip(NAMES, means.tolist(), strict=True)), gradients


def reference_of_steps(student, teacher, *args):
    """Metrics and gradients of each update step of ``STEP_OF_16``."""
    make = tiny.adapted_model if "lora_rank" in student else tiny.tiny_model
    models = make(student).double(), tiny.tiny_model(teacher, seed=1).double()
    samples = tiny.make_samples(NUM_SAMPLES, num_without_targets=3, mask_prompts=False)
    order = epoch_permutation(NUM_SAMPLES, epoch=0, shuffle=True).tolist()
    with tiny.float64_throughout():
        return [
            metrics_and_gradients(*models, [samples[i] for i in step], *args)
            for step in (order[:16], order[16:])
        ]


def step_of_16(tiny_kd_config, kind, **changes):
    """A config of the update steps above; ``kind`` of both models."""
    kd_loss = {"_component_": "recipe_utils.loss.LinearDistillationLoss", "tokens_per_chunk": 20}
    kd_loss |= {"temperature": 2.0, **changes.pop("kd_loss", {})}
    return tiny_kd_config(
        **{
            "model": STUDENTS[kind],
            "teacher_sizes": TEACHERS[kind],
            "kd_ratio": 0.3,
            "kd_loss": kd_loss,
            **STEP_OF_16,
            **changes,
        }
    )
