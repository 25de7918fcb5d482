"""Cross-entropy and divergence from a teacher, computed from hidden states in chunks of target tokens.

Example: a teacher with p = (0.5, 0.5) and a student with q = (0.9, 0.1) have a forward divergence of 0.51 nats, which
punishes that the student all but excludes a token; a reverse one of 0.37, a symmetric one of 0.44 and js of 0.10.

Shapes: b samples, s positions per sample, n target tokens, c target tokens of a chunk; d embedding
width and v vocabulary of the student, d_t and v_t of the teacher, m = min(v, v_t) common tokens.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_utils.losses.chunks import ChunkedLoss, OutputLayer, chunks_of, compiled_for_all_lengths
from recipe_utils.update_steps.step import Targets

Kind = Literal["forward", "reverse", "symmetric", "js"]

SUMS = ("loss", "ce_loss", "kd_loss", "teacher_entropy", "teacher_agreement")
"""Names of the sums that the loss returns: differentiated loss; cross-entropy [nats]; divergence [nats]
without T^2; teacher's entropy [nats]; number of rows where both have the same most likely token."""

_LOGITS_IN_CACHES = 2**20
"""Fits into a CPU's caches together with its intermediate results."""
_LOGITS_FOR_A_GPU = 2**23
"""Enough to keep a GPU busy, and a fraction of a chunk."""


class TeacherHidden(NamedTuple):
    """Teacher given by its last hidden states: exact at any temperature, for any divergence."""

    hidden: Tensor
    """Hidden states after the final norm, at the target positions, [n, d_t]."""
    output: Any
    """Output layer, [c, d_t] -> [c, v_t], with a plain (unsharded) weight. Its logits are overwritten."""
    bias: Tensor | None = None
    """Dual variable of Sinkhorn-Knopp, [v_t]: the targets are softmax(logits / t + bias)."""

    def logits_like(self, logits: Tensor, rows: slice, temperature: float) -> Tensor:
        """Returns logits / temperature + bias of the m tokens, [c, m], in the dtype of ``logits`` [c, v]."""
        teacher_logits = self.output(self.hidden[rows])[:, : logits.size(1)].to(logits.dtype)
        if temperature != 1:
            teacher_logits /= temperature
        if self.bias is not None:
            teacher_logits += self.bias[: logits.size(1)]
        return teacher_logits


# ---- Divergences and their gradients in closed form -------------------------------------------------

Divergence = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes log-probabilities of c rows over m tokens, log_q of the student and log_p of the teacher, and p = exp(log_p),
all [c, m]. Returns the divergence of each row [c] in nats, and h = dD / d log_q [c, m].

For logits z with softmax q, dD / dz = h - q * sum(h); h may omit a multiple of q, which cancels
there. ``log_p`` and ``p`` may be overwritten.

Autograd within a chunk takes 7% (forward), 5% (reverse) and 11% (js) more time of a whole update step, with equal
losses: medians of 12 to 16 alternating pairs, 5M teacher and 1M student, batch 4 x 4, packed, fp32, thread time of
one CPU thread. The symmetric divergence adds up the first two."""


def forward_kl(log_q: Tensor, log_p: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns KL(p || q): the student covers all modes of the teacher."""
    divergence = (p * log_p.sub_(log_q)).sum(1)
    return divergence, p.neg_()


def reverse_kl(log_q: Tensor, log_p: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns KL(q || p): the student concentrates on modes of the teacher."""
    log_ratio = torch.sub(log_q, log_p, out=log_p)
    h = torch.exp(log_q, out=p).mul_(log_ratio)
    return h.sum(1), h


def symmetric_kl(log_q: Tensor, log_p: Tensor, p: Tensor, part_of_forward: float) -> tuple[Tensor, Tensor]:
    """Returns a weighted mean of both; ``part_of_forward`` is torchtune's ``sym_kd_ratio``."""
    reverse, h = reverse_kl(log_q, log_p.clone(), p.clone())
    h.mul_(1 - part_of_forward)
    forward, h_of_forward = forward_kl(log_q, log_p, p)
    divergence = part_of_forward * forward + (1 - part_of_forward) * reverse
    return divergence, h.add_(h_of_forward, alpha=part_of_forward)


def jensen_shannon(log_q: Tensor, log_p: Tensor, p: Tensor, part_of_teacher: float) -> tuple[Tensor, Tensor]:
    """Returns b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q and b = ``part_of_teacher``.

    The generalized divergence of on-policy distillation (Agarwal et al. 2024, arXiv:2306.13649,
    equation 1); b is TRL's ``beta`` and must be above 0 and below 1.
    """
    b = part_of_teacher  # a float: a tensor on the device would be copied there, and the host would wait
    log_m = torch.logaddexp(log_p + math.log(b / (1 - b)), log_q).add_(math.log(1 - b))
    teacher_part = p.mul_(log_p.sub_(log_m)).sum(1)
    log_ratio = torch.sub(log_q, log_m, out=log_m)
    h = torch.exp(log_q, out=p).mul_(log_ratio)
    return b * teacher_part + (1 - b) * h.sum(1), h.mul_(1 - b)


class LinearDistillationLoss(ChunkedLoss):
    """Sum over targets t of w_t [(1 - r) CE_t + r T^2 D_t(teacher || student)], computed in chunks.

    Both sides of D_t have temperature T (Hinton et al. 2015, arXiv:1503.02531, section 2.1) and are normalized over the
    m common tokens. For further arguments see :class:`recipe_utils.losses.chunks.ChunkedLoss`.

    Args:
        divergence: ``forward``, ``reverse``, ``symmetric`` or ``js``; see :data:`Divergence`.
        temperature: T, by which the logits of both are divided.
        mixture: weight of the forward divergence in ``symmetric``; weight of the teacher in ``js``.
        teacher_temperature: temperature of the teacher; None is T. If set, the divergence is not
            multiplied by T^2.
        tokens_per_chunk: target tokens projected at once; takes two to three times
            ``tokens_per_chunk * v`` fp32 numbers, compiled four to five times.

    Raises ValueError if an argument is out of bounds.
    """

    sums = SUMS

    def __init__(
        self,
        divergence: Kind = "forward",
        temperature: float = 1.0,
        mixture: float = 0.5,
        teacher_temperature: float | None = None,
        tokens_per_chunk: int = 256,
        num_output_chunks: int = 8,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(tokens_per_chunk, num_output_chunks, ignore_index, "kd_loss")
        divergences: dict[str, Divergence] = {
            "forward": forward_kl,
            "reverse": reverse_kl,
            "symmetric": partial(symmetric_kl, part_of_forward=mixture),
            "js": partial(jensen_shannon, part_of_teacher=mixture),
        }
        if divergence not in divergences:
            raise ValueError(f"kd_loss.divergence={divergence}: unknown; set it to one of {', '.join(divergences)}")
        temperatures = {"temperature": temperature, "teacher_temperature": teacher_temperature}
        for name, value in temperatures.items():
            # Beyond, softmax has no gradient in fp32.
            if value is not None and not 0.01 <= value <= 1000:
                raise ValueError(f"kd_loss.{name}={value}: it must be from 0.01 to 1000")
        if not 0 <= mixture <= 1 or (divergence == "js" and mixture in (0, 1)):
            raise ValueError(
                f"kd_loss.mixture={mixture}: it must be between 0 and 1, and neither of them with "
                "divergence=js; set divergence=forward or reverse for one side alone"
            )
        if mixture != 0.5 and divergence in ("forward", "reverse"):
            raise ValueError(f"kd_loss.mixture={mixture}: it has no effect with divergence={divergence}; remove it")
        self.divergence = divergences[divergence]
        self.temperature = temperature
        self.teacher_temperature = teacher_temperature or temperature
        self.kd_ratio = 1.0
        """r; 1 needs no labels and computes no cross-entropy."""
        self._square = temperature**2 if teacher_temperature is None else 1.0
        self._compute: Callable[..., tuple[Tensor, Tensor | None]] = self._in_slices

    def compile_chunks(self, backend: Any) -> None:
        """Compiles the arithmetic on logits, once for chunks of any length.

        They are not split then: compiled code keeps intermediate results in caches.
        """

        def normalize_and_sum(logits: Tensor, teacher_logits: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
            return self._sums_and_gradient(logits, F.log_softmax(teacher_logits, dim=-1), *others)

        self._compute = compiled_for_all_lengths(normalize_and_sum, backend)

    def forward(self, output: OutputLayer, hidden: Tensor, targets: Targets, backward_in_parts: bool = False) -> Tensor:
        """Returns SUMS over the targets, [5], at least fp32; only the first has a gradient.

        ``targets`` have the teacher's outputs attached; without targets the sums are 0, with a
        graph. For the arguments see :mod:`recipe_utils.losses.attach`.
        """
        hidden, labels = self.at_targets(hidden, targets)
        by_target = self.new_losses(hidden)
        sums = self.sum_rows(output, hidden, labels, targets.outputs["teacher"], None, backward_in_parts, by_target)
        self.record_losses(by_target, targets)
        return sums

    def sum_rows(
        self,
        output: OutputLayer,
        hidden: Tensor,
        labels: Tensor | None,
        teacher: TeacherHidden,
        row_weights: Tensor | None = None,
        backward_in_parts: bool = False,
        losses: Tensor | None = None,
    ) -> Tensor:
        """Returns SUMS over the rows of ``hidden`` [n, d], weighted by ``row_weights`` [n].

        ``labels`` [n] may be None if ``kd_ratio`` is 1. ``losses`` [n] are set. See :meth:`forward`.
        """

        def chunk_loss(logits: Tensor, rows: slice, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
            teacher_logits = teacher.logits_like(logits, rows, self.teacher_temperature)
            label = labels[rows] if labels is not None else None
            sums, gradient = self._compute(logits, teacher_logits, label, needs_gradient)
            if losses is not None:
                losses[rows] = sums[0]
            if row_weights is not None:
                sums *= row_weights[rows]
                if gradient is not None:
                    gradient *= row_weights[rows].unsqueeze(1)
            return sums.sum(1), gradient

        return self.sum_over_chunks(output, hidden, chunk_loss, len(SUMS), backward_in_parts)

    def _in_slices(
        self, logits: Tensor, teacher_logits: Tensor, label: Tensor | None, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Computes few rows at a time, which fit into caches; the gradient overwrites the logits."""
        sums = logits.new_empty(len(SUMS), len(logits))
        at_once = _LOGITS_IN_CACHES if logits.device.type == "cpu" else _LOGITS_FOR_A_GPU
        for few in chunks_of(len(logits), max(1, at_once // logits.size(1))):
            teacher_logits[few] = F.log_softmax(teacher_logits[few], dim=-1)
            sums[:, few], gradient = self._sums_and_gradient(
                logits[few], teacher_logits[few], None if label is None else label[few], needs_gradient
            )
            if gradient is not None:
                logits[few] = gradient
        return sums, logits if needs_gradient else None

    def _sums_and_gradient(
        self, logits: Tensor, log_p: Tensor, label: Tensor | None, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns SUMS of each row, [5, c], and the loss's gradient for the logits, [c, v] or None.

        ``log_p`` [c, m] is overwritten. ``label`` [c] may be None if ``kd_ratio`` is 1.
        """
        # Cross-entropy over all tokens of the student.
        num_tokens = log_p.size(1)
        ce_weight, kd_weight = 1 - self.kd_ratio, self.kd_ratio * self._square
        ce_loss = logits.new_zeros(len(logits))
        if ce_weight:
            assert label is not None
            label = label.unsqueeze(1)
            log_probs = F.log_softmax(logits, dim=-1)
            ce_loss = -log_probs.gather(1, label).squeeze(1)

        # The divergence is over the common tokens; at temperature 1 and equal vocabularies the softmax is the same.
        shares_softmax = bool(ce_weight) and self.temperature == 1 and num_tokens == logits.size(1)
        if shares_softmax:
            log_q = log_probs
        else:
            common = logits[:, :num_tokens]
            log_q = F.log_softmax(common if self.temperature == 1 else common / self.temperature, dim=-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(1)
        most_likely = log_p.argmax(1, keepdim=True)
        kd_loss, h = self.divergence(log_q, log_p, p)
        # Twice as fast as a second argmax.
        agrees = (log_q.gather(1, most_likely).squeeze(1) == log_q.amax(1)).to(log_q.dtype)
        loss = kd_weight * kd_loss
        if ce_weight:
            loss += ce_weight * ce_loss
        sums = torch.stack([loss, ce_loss, kd_loss, entropy, agrees])
        if not needs_gradient:
            return sums, None

        # For the logits whose softmax is exp(log_q): h - q * sum(h), see Divergence.
        scale = kd_weight / self.temperature
        of_q = -scale * h.sum(1, keepdim=True)
        if shares_softmax:
            of_q += ce_weight  # the softmax in cross-entropy's gradient, softmax(logits) - one_hot(label)
        gradient = h.mul_(scale).addcmul_(log_q.exp_(), of_q)
        if ce_weight and not shares_softmax:
            of_common, gradient = gradient, log_probs.exp_().mul_(ce_weight)
            gradient[:, :num_tokens] += of_common
        elif num_tokens < logits.size(1):
            gradient = F.pad(gradient, (0, logits.size(1) - num_tokens))
        if ce_weight:
            assert label is not None
            gradient.scatter_add_(1, label, gradient.new_full((), -ce_weight).expand_as(label))
        return sums, gradient
