"""Policy gradients on rollouts, summed over trained tokens in chunks.

A token has the log-probabilities ``lp`` now, ``old`` in the policy that its round begins with, ``samp`` in the sampler and
``ref`` in a reference, and the advantage A. r = exp(lp - old) and w = exp(old - samp), which differs from 1 if the sampler
has other kernels, another precision or older weights. The loss of an update step is the weighted sum of

=============  ==============================================================  ===================================
kind           term of a token                                                 source
=============  ==============================================================  ===================================
``clipped``    -min(r A, clip(r, 1 - low, 1 + high) A)                         GRPO, Dr. GRPO, DAPO
``sequence``   the same with s = exp(mean of lp - old over the answer) as r    GSPO-token, arXiv:2507.18071
``cispo``      -sg(min(r, 1 + high)) A lp                                      CISPO, arXiv:2506.13585
``reinforce``  -A lp                                                           RLOO, arXiv:2402.14740
=============  ==============================================================  ===================================

times min(w, high) (``correction: truncate``) or w within bounds and 0 elsewhere (``mask``), plus ``kl_weight`` times an
estimator of the KL to the reference. s has the gradient s d lp of each token. With one advantage for an answer and no
correction that is the gradient of s itself (GSPO); otherwise each token keeps what it has of its own (GSPO-token).
Exponents are at most 20, so that one log-probability of a sampler far off gives no infinite ratio.

Every term but s is separable by token, and every weight is data, known before the first forward: in update steps with N
tokens, m answers and P prompts, of which a group has N_g tokens and an answer n_i,

==============  ======================  ===================================================
normaliser      weight of a token       who
==============  ======================  ===================================================
``tokens``      1 / N                   DAPO in verl, TRL, torchtitan, OpenRLHF
``answers``     1 / (m n_i)             GRPO, arXiv:2402.03300
``constant``    1 / (m L)               Dr. GRPO, arXiv:2503.20783; L is ``tokens_per_answer``
``prompts``     1 / (P N_g)             ScaleRL, arXiv:2510.13786; DAPO, arXiv:2503.14476
==============  ======================  ===================================================

Shapes: n target tokens, c of a chunk, p sequences, v vocabulary, k sums.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from recipe_utils.losses.chunks import OutputLayer, compiled_for_all_lengths, sum_dtype
from recipe_utils.losses.log_probs import LinearLogProbs, gradient_of_logits, temperatures_of, tempered
from recipe_utils.update_steps.step import Targets

_CLIPS: Mapping[str, tuple[float | None, float | None]] = {
    "clipped": (0.2, 0.2),
    "sequence": (3e-4, 4e-4),
    "cispo": (None, 0.2),
    "reinforce": (None, None),
}
"""Kind -> default of ``clip_low`` and ``clip_high``; None where the kind has none."""
MAX_EXPONENT = 20.0
"""Bound of log-ratios before ``exp``, as in verl, slime and miles: beyond, a ratio is constant."""
_DIVISORS = {"tokens": "answer_tokens", "answers": "answers", "constant": "answers", "prompts": "groups"}
_WEIGHTS = {**_DIVISORS, "constant": "answer_tokens"}
"""Normaliser -> column of each token's weight."""
_CORRECTIONS: Mapping[str | None, tuple[float | None, float | None]] = {
    None: (None, None),
    "truncate": (None, 2.0),
    "mask": (0.5, 5.0),
}
"""Correction -> default of its bounds."""
_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": lambda difference: torch.expm1(bounded := (-difference).clamp(max=MAX_EXPONENT)) - bounded,
}
"""Name -> estimator of the KL for lp - ref [c]."""
_SELECTS = "it selects tokens by their rank among others, so the gradient would depend on how samples are grouped"
_REFUSED = {
    **dict.fromkeys(("clip_cov", "kl_cov", "top_entropy"), _SELECTS),
    **dict.fromkeys(("ppo", "gae", "vapo"), "it needs a critic, which is not trained here"),
}
"""Kinds of other trainers that are refused, and the reason."""


class PolicyLoss(LinearLogProbs):
    """Policy gradients on given rollouts; see the table of :mod:`recipe_utils.policy.policy_losses`.

    Args:
        kind: ``clipped`` (GRPO, Dr. GRPO, DAPO), ``sequence`` (GSPO), ``cispo`` or ``reinforce``.
        clip_low, clip_high: bounds of the ratio, 1 - low and 1 + high. Default: 0.2; 3e-4 and 4e-4 for ``sequence``.
        clip_dual: maximum of the ratio where the advantage is negative, above 1 (dual clip, arXiv:1912.09729; verl's
            ``clip_ratio_c``); null has none.
        normaliser: ``tokens``, ``answers``, ``constant`` or ``prompts``.
        tokens_per_answer: L of ``constant``, such as the sampler's maximum.
        kl: estimator of the KL to the reference; null is ``k2``. The gradient of ``k2`` is that of the KL itself on policy; as
            losses, ``k1`` has an expected gradient of 0 and ``k3`` that of the KL in the other direction
            (http://joschu.net/blog/kl-approx.html).
        kl_weight: its weight; 0 needs no reference.
        correction: corrects the difference to the sampler, by w: ``truncate`` (TIS) or ``mask`` (IcePop). Masked tokens stay in
            what the loss is divided by. It needs ``old: start``.
        correction_low, correction_high: bounds of w, around 1. Default: 2 at most; from 0.5 to 5 for ``mask``.
        old: ``file``: the sampler's log-probabilities, as far as the file has them; ``start``: the policy at the start of the round.
        tokens_per_chunk, num_output_chunks: see :class:`recipe_utils.losses.chunks.ChunkedLoss`.

    Raises:
        ValueError: a wrong value, or one without an effect.
    """

    splits_backward = True
    returns_sums = False
    totals: ClassVar = ("answer_tokens", "answers", "groups", "rewards", "equal_groups", "masked", "measured")
    """Tokens, answers, groups, rewards, groups of equal rewards and answers without a trained token of an update step,
    and tokens that are computed."""
    refused: ClassVar = {
        **dict.fromkeys(("top_entropy_quantile", "clip_cov_ratio", "kl_cov_ratio"), _SELECTS),
        **dict.fromkeys(("value_coef", "vf_coef", "gamma", "lam", "cliprange_value"), "there is no critic"),
    }
    """Arguments of other trainers' losses that are refused, and the reason."""

    def __init__(
        self,
        kind: str = "clipped",
        clip_low: float | None = None,
        clip_high: float | None = None,
        clip_dual: float | None = None,
        normaliser: str = "tokens",
        tokens_per_answer: int | None = None,
        kl: str | None = None,
        kl_weight: float = 0.0,
        correction: str | None = None,
        correction_low: float | None = None,
        correction_high: float | None = None,
        old: str = "file",
        tokens_per_chunk: int = 2048,
        num_output_chunks: int = 8,
    ) -> None:
        super().__init__(tokens_per_chunk, num_output_chunks)
        if kind in _REFUSED:
            raise ValueError(f"loss.kind={kind}: {_REFUSED[kind]}; set it to {_one_of(_CLIPS)}")
        choices = {
            "kind": (kind, _CLIPS), "normaliser": (normaliser, _DIVISORS), "kl": (kl, (None, *_ESTIMATORS)),
            "correction": (correction, _CORRECTIONS), "old": (old, ("file", "start")),
        }  # fmt: skip
        for name, (value, values) in choices.items():
            if value not in values:
                raise ValueError(f"loss.{name}={value}: unknown; set it to {_one_of(values)}")
        if (normaliser == "constant") != (tokens_per_answer is not None):
            text = "is the L of normaliser=constant, and has no effect on others; set both, or none"
            raise ValueError(f"loss.tokens_per_answer={tokens_per_answer}: it {text}")
        if tokens_per_answer is not None and not 1 <= tokens_per_answer < math.inf:
            raise ValueError(f"loss.tokens_per_answer={tokens_per_answer}: it must be at least 1")
        if not 0 <= kl_weight < math.inf:
            raise ValueError(f"loss.kl_weight={kl_weight}: it must be a number of at least 0")
        if kl is not None and kl_weight == 0:
            raise ValueError(f"loss.kl={kl}: it has no effect with kl_weight=0; set kl_weight above 0, or take kl out")
        if clip_dual is not None and kind not in ("clipped", "sequence"):
            raise ValueError(f"loss.clip_dual={clip_dual}: it has no effect on kind={kind}; take it out")
        if clip_dual is not None and not clip_dual > 1:
            raise ValueError(f"loss.clip_dual={clip_dual}: the ratio begins at 1; set it above 1, such as 3")
        if correction is not None and old == "file":
            text = "has no effect on old=file, which is the sampler's policy itself; set loss.old=start"
            raise ValueError(f"loss.correction={correction}: it {text}")
        self.kind, self.normaliser, self.kl, self.kl_weight = kind, normaliser, kl or "k2", kl_weight
        self.correction, self.old, self._factor = correction, old, 1 / (tokens_per_answer or 1)
        self._low, self._high = _bounds("clip", (clip_low, clip_high), f"kind={kind}", _CLIPS[kind])
        self._dual = clip_dual
        bounds = (correction_low, correction_high), f"correction={correction}", _CORRECTIONS[correction]
        self._least, self._most = _bounds("correction", *bounds)
        if not (self._least or 0) <= 1 <= (math.inf if self._most is None else self._most):
            text = (
                f"loss.correction_low={self._least}, correction_high={self._most}: tokens that the sampler gives the "
            )
            raise ValueError(f"{text}policy's own probability (w = 1) are outside; set bounds around 1")
        # What it takes of samples, and returns.
        needed = {"advantages", _WEIGHTS[normaliser], _DIVISORS[normaliser]} - {"answer_tokens"}
        others = dict.fromkeys(("answers", "groups", "equal_groups", "masked", "teacher"), 0.0)
        unknown = dict.fromkeys(("logprobs", "ref_logprobs", "rewards"), torch.nan)
        defaults = {"advantages": 0.0, "temperatures": 1.0, "answer_tokens": 1.0, "measured": 1.0, **others, **unknown}
        self.columns = {name: None if name in needed else default for name, default in defaults.items()}
        self.divisor = _DIVISORS[normaliser]
        clips = ("clipped_low", self._low), ("clipped_high", self._high), ("clipped_dual", clip_dual)
        self.sums = (
            "loss", "entropy", "ratio", "kl_sampler", *(name for name, bound in clips if bound is not None),
            *["corrected"] * (correction is not None), *["kl_reference"] * self.has_kl,
        )  # fmt: skip
        self._entropies, self._gradient_of_logits = entropies, gradient_of_logits
        self._seen: Tensor | None = None
        self._returns_log_probs = False

    @property
    def has_kl(self) -> bool:
        """Returns True with a KL term, which also groups of equal rewards have."""
        return self.kl_weight > 0

    def compile_chunks(self, backend: Any) -> None:
        """Compiles the arithmetic on logits, once for chunks of any length."""
        super().compile_chunks(backend)
        self._entropies = compiled_for_all_lengths(entropies, backend)
        self._gradient_of_logits = compiled_for_all_lengths(gradient_of_logits, backend)

    @contextmanager
    def returning_log_probs(self) -> Iterator[None]:
        """Makes it return log-probabilities [n] in the block."""
        self._returns_log_probs = True
        try:
            yield
        finally:
            self._returns_log_probs = False

    def forward(self, output: OutputLayer, hidden: Tensor, targets: Targets, backward_in_parts: bool = False) -> Tensor:
        """Returns the sums of ``self.sums``, [k]: the weighted loss, and metrics over measured tokens.

        ``targets`` may have outputs ``old`` and ``reference``, log-probabilities [n]. For the arguments see
        :mod:`recipe_utils.losses.attach`.
        """
        if self._returns_log_probs:
            return super().forward(output, hidden, targets)
        hidden, labels = self.at_targets(hidden, targets)
        given, temperatures = self._given(targets, sum_dtype(hidden)), temperatures_of(targets)
        if self.kind == "sequence":
            # The ratio of an answer is known once all of its tokens are: one more projection, without gradients.
            with torch.no_grad():
                now = self.of_labels(output, hidden, labels, temperatures)
            given = given._replace(means=_means_of_sequences(now, given.old, targets))
        by_target = self.new_losses(hidden)
        items = torch.full_like(labels, -1) if targets.items is None else targets.of_targets(targets.items)
        of_targets = torch.stack([items, labels])

        def chunk_loss(logits: Tensor, rows: slice, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
            divisors = None if temperatures is None else temperatures[rows]
            logits = tempered(logits, divisors)
            picked, normalizers = self.arithmetic[0](logits, labels[rows])
            log_probs = picked - normalizers
            of_distributions, probabilities = self._entropies(logits, normalizers)
            del logits
            # The gradient of each log-probability, which is a leaf here, then that of the logits.
            with torch.enable_grad():
                leaf = log_probs.detach().requires_grad_()
                of_chunk = given.of_rows(rows)
                terms, metrics = self._terms(leaf, of_chunk)
                loss = (of_chunk.weights * terms).sum()
                (slopes,) = torch.autograd.grad(loss, leaf) if needs_gradient else (None,)
            if needs_gradient:
                self._note(metrics, log_probs, of_targets[:, rows], of_chunk.measured)
            if by_target is not None:
                by_target[rows] = terms.detach()
            metrics = {"entropy": of_distributions, **metrics}
            sums = [loss.detach(), *((of_chunk.measured * metrics[name]).sum() for name in self.sums[1:])]
            if slopes is None:
                return torch.stack(sums), None
            slopes = slopes if divisors is None else slopes / divisors.to(slopes.dtype)
            return torch.stack(sums), self._gradient_of_logits(probabilities, labels[rows], slopes)

        sums = self.sum_over_chunks(output, hidden, chunk_loss, len(self.sums), backward_in_parts)
        self.record_losses(by_target, targets)
        return sums

    def _given(self, targets: Targets, dtype: torch.dtype) -> "_Given":
        """Returns the values of each target that are known before the forward."""
        names = ("advantages", "logprobs", "ref_logprobs", "teacher", "measured", _WEIGHTS[self.normaliser])
        values = {name: targets.values[name].to(dtype) for name in names}
        old = values["logprobs"]
        if self.old == "start":
            old = torch.full_like(old, torch.nan)
        if "old" in targets.outputs:
            old = torch.where(old.isnan(), targets.outputs["old"].to(dtype), old)
        reference = values["ref_logprobs"]
        if "reference" in targets.outputs:
            reference = torch.where(reference.isnan(), targets.outputs["reference"].to(dtype), reference)
        advantages = values["advantages"]
        if "teacher" not in targets.defaults:
            # On-policy distillation: zero, not NaN, for tokens without a teacher.
            by_teacher = (reference - values["logprobs"]) * values["teacher"]
            advantages = advantages + torch.where(values["teacher"] == 0, 0.0, by_teacher)
        weights = values[_WEIGHTS[self.normaliser]] * self._factor
        return _Given(weights, values["measured"], advantages, values["logprobs"], old, reference)

    def _terms(self, log_probs: Tensor, given: "_Given") -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the terms of tokens [c] and metrics [c] by name, for log-probabilities [c]."""
        # Unknown ones are those of the policy now: the ratio is 1, with the gradient of the log-probability.
        now, advantages = log_probs.detach(), given.advantages
        old = torch.where(given.old.isnan(), now, given.old)
        sampled = torch.where(given.sampled.isnan(), old, given.sampled)
        # An answer's ratio has the gradient of each token's own log-probability.
        difference = log_probs - old if given.means is None else given.means + (log_probs - now)
        ratio = _exp(difference)
        # The policy term of the kind, minimised.
        low, high = 1 - (self._low or 0), 1 + (self._high or 0)
        if self.kind == "reinforce":
            terms = -advantages * log_probs
        elif self.kind == "cispo":
            terms = -ratio.detach().clamp(max=high) * advantages * log_probs
        else:
            bounded = ratio if self._dual is None else torch.where(advantages < 0, ratio.clamp(max=self._dual), ratio)
            terms = -torch.minimum(bounded * advantages, bounded.clamp(low, high) * advantages)
        # The sampler was another policy than `old`: its tokens weigh more or less, or nothing.
        mismatch = _exp(old - sampled)
        is_within = (mismatch >= (self._least or 0)) & (mismatch <= (self._most or torch.inf))
        if self.correction == "truncate":
            terms = terms * mismatch.clamp(max=self._most)
        elif self.correction == "mask":
            terms = terms * torch.where(is_within, mismatch, 0.0)
        ratio = ratio.detach()
        metrics = {
            "ratio": ratio,
            "kl_sampler": sampled - now,
            "clipped_low": (ratio < low) & (advantages < 0),
            "clipped_high": (ratio > high) & (advantages > 0),
            "clipped_dual": (ratio > (self._dual or torch.inf)) & (advantages < 0),
            "corrected": ~is_within,
        }
        # The reference pulls with the same weight of each token, uncorrected.
        if self.has_kl:
            kl = _ESTIMATORS[self.kl](log_probs - given.reference)
            terms, metrics["kl_reference"] = terms + self.kl_weight * kl, kl.detach()
        return terms, metrics

    def _note(self, metrics: Mapping[str, Tensor], now: Tensor, of: Tensor, measured: Tensor) -> None:
        """Keeps the values of :class:`Seen` of measured tokens [c], without a wait for the device; ``of`` is [2, c]."""
        if not len(now):
            return
        is_measured, difference, ratio = measured > 0, -metrics["kl_sampler"], metrics["ratio"]
        rows = torch.cat([torch.stack([difference, now, now - difference]).double(), of.double()])
        sums = torch.stack([_exp(difference), difference, torch.ones_like(now)]).double()
        is_counted = is_measured & (difference <= MAX_EXPONENT)
        masked = torch.where(is_measured, difference.double(), -torch.inf)
        largest = rows.index_select(1, masked.argmax().view(1)).view(-1)
        largest[0] = masked.max()
        found = torch.cat(
            [torch.where(is_measured, ratio, 0.0).max().double().view(1), largest, (sums * is_counted).sum(1)]
        )
        self._seen = found if self._seen is None else Seen.of_both(self._seen, found)

    def take_seen(self, device: torch.device) -> Tensor:
        """Returns the values of :class:`Seen` of the trained tokens since the last call, fp64."""
        seen, self._seen = self._seen, None
        return torch.tensor(Seen(), dtype=torch.float64, device=device) if seen is None else seen


class Seen(NamedTuple):
    """Ratios of the measured tokens of an update step, and the token that the sampler found least likely beside this model."""

    largest: float = 0.0
    """Largest ratio of the loss."""
    difference: float = -math.inf
    """Largest lp - logprobs, of the token whose log-probabilities, index of the sample and label follow."""
    now: float = 0.0
    sampled: float = 0.0
    item: float = -1.0
    label: float = -1.0
    ratios: float = 0.0
    """Sums of exp(lp - logprobs) and of lp - logprobs, and the number of tokens, without those that are bounded."""
    differences: float = 0.0
    tokens: float = 0.0

    @staticmethod
    def of_both(one: Tensor, other: Tensor) -> Tensor:
        """Returns the values of the tokens of two tensors."""
        named = torch.where(other[1] > one[1], other, one)[1:6]
        return torch.cat([one[:1].maximum(other[:1]), named, one[6:] + other[6:]])


class _Given(NamedTuple):
    """Values of each target that are known before the forward, [n] each; NaN is unknown."""

    weights: Tensor
    measured: Tensor
    """1 for tokens, 0 for the targets in place of groups that are not computed."""
    advantages: Tensor
    sampled: Tensor
    """Log-probability in the policy that sampled it."""
    old: Tensor
    """The same in the policy that the ratio compares with."""
    reference: Tensor
    means: Tensor | None = None
    """Mean of lp - old over each target's answer, of ``sequence``."""

    def of_rows(self, rows: slice) -> "_Given":
        """Returns those of some targets [c]."""
        return _Given(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]


def _means_of_sequences(now: Tensor, old: Tensor, targets: Targets) -> Tensor:
    """Returns the mean over the sequence of now - old, of each target's sequence [n], for log-probabilities [n]."""
    assert targets.samples is not None
    owners, of_sequences = targets.sequences, now.new_zeros(len(targets.samples))
    differences = torch.where(old.isnan(), 0.0, now - old)
    sums = of_sequences.index_add(0, owners, differences)
    numbers = of_sequences.index_add(0, owners, torch.ones_like(differences))
    return (sums / numbers.clamp(min=1)).index_select(0, owners)


def _exp(difference: Tensor) -> Tensor:
    """Returns the ratio [c] of two probabilities, for a difference of log-probabilities [c]; constant beyond e^20."""
    return difference.clamp(max=MAX_EXPONENT).exp()


def entropies(logits: Tensor, normalizers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns entropies [c] and probabilities [c, v], for logits [c, v] and their log-sum-exp [c]."""
    probabilities = (logits - normalizers.unsqueeze(1)).exp_()
    return normalizers - torch.einsum("cv,cv->c", probabilities, logits), probabilities


def _bounds(
    name: str,
    given: tuple[float | None, float | None],
    owner: str,
    defaults: tuple[float | None, float | None],
) -> tuple[float | None, float | None]:
    """Returns the lower and the upper bound ``name`` of an ``owner``; raises ValueError for one that it has not."""
    bounds = []
    for side, value, default in zip(("low", "high"), given, defaults, strict=True):
        if value is not None and default is None:
            raise ValueError(f"loss.{name}_{side}={value}: it has no effect on {owner}; take it out")
        if value is not None and not value >= 0:
            raise ValueError(f"loss.{name}_{side}={value}: it must be at least 0")
        bounds.append(default if value is None else float(value))
    return bounds[0], bounds[1]


def _one_of(values: Any) -> str:
    return f"one of {', '.join('null' if value is None else str(value) for value in values)}"
