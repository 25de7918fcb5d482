"""How far a student's distribution is from a teacher's: divergences and their gradients in closed form.

Each function takes log-probabilities of c rows over o outcomes, log_q of the student and log_p of the teacher,
and p = exp(log_p), all [c, o], and returns the divergence of each row [c] in nats, and h = dD / d log_q [c, o].
An outcome is a token, or a set of tokens; of logits z whose softmax gives q, dD / dz follows as h - q * sum(h).
h may leave out a multiple of q, which cancels there. ``log_p`` and ``p`` may be overwritten; an outcome of
probability 0 has a large negative logarithm, not minus infinity.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_kl(log_q: Tensor, log_p: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q): the student covers what the teacher finds likely."""
    divergence = (p * log_p.sub_(log_q)).sum(1)
    return divergence, p.neg_()


def reverse_kl(log_q: Tensor, log_p: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p): the student keeps to what the teacher finds likely."""
    log_ratio = torch.sub(log_q, log_p, out=log_p)
    h = torch.exp(log_q, out=p).mul_(log_ratio)
    return h.sum(1), h


def symmetric_kl(
    log_q: Tensor, log_p: Tensor, p: Tensor, part_of_forward: float
) -> tuple[Tensor, Tensor]:
    """A mean of both, weighted; torchtune's ``sym_kd_ratio`` is the part of the forward one."""
    reverse, h = reverse_kl(log_q, log_p.clone(), p.clone())
    h.mul_(1 - part_of_forward)
    forward, of_forward = forward_kl(log_q, log_p, p)
    divergence = part_of_forward * forward + (1 - part_of_forward) * reverse
    return divergence, h.add_(of_forward, alpha=part_of_forward)


def jensen_shannon(
    log_q: Tensor, log_p: Tensor, p: Tensor, part_of_teacher: float
) -> tuple[Tensor, Tensor]:
    """Of both to their mean: b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q.

    The generalised divergence of on-policy distillation (Agarwal et al. 2024, arXiv:2306.13649, equation 1),
    TRL's ``beta`` being b.

    Args:
        log_q: see the module.
        log_p: likewise.
        p: likewise.
        part_of_teacher: b, above 0 and below 1.
    """
    b = torch.tensor(part_of_teacher, dtype=log_q.dtype, device=log_q.device)
    log_m = torch.logaddexp(log_p + torch.logit(b), log_q).add_((1 - b).log())
    of_teacher = p.mul_(log_p.sub_(log_m)).sum(1)
    log_ratio = torch.sub(log_q, log_m, out=log_m)
    h = torch.exp(log_q, out=p).mul_(log_ratio)
    return b * of_teacher + (1 - b) * h.sum(1), h.mul_(1 - b)
