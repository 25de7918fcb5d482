"""Policy gradients on rollouts, summed over trained tokens in chunks.

A token has the log-probabilities ``lp`` now, ``old`` in the policy that its round begins with, ``samp`` in the sampler and
``ref`` in a reference, and the advantage A. r = exp(lp - old) and w = exp(old - samp), which differs from 1 if the sampler
has other kernels, another precision or older weights. The loss of an update step is the weighted sum of

=============  ==============================================================  ===================================
kind           term of a token                                                 source
=============  ==============================================================  ===================================
``clipped``    -min(r A, clip(r, 1 - low, 1 + high) A)                         GRPO, Dr. GRPO, DAPO
``sequence``   the same with s = exp(mean of lp - old over the answer) as r    GSPO, arXiv:2507.18071
``cispo``      -sg(min(r, 1 + high)) A lp                                      CISPO, arXiv:2506.13585
``reinforce``  -A lp                                                           RLOO, arXiv:2402.14740
=============  ==============================================================  ===================================

times min(w, high) (``correction: truncate``) or w within bounds and 0 elsewhere (``mask``), plus ``kl_weight`` times an
estimator of the KL to the reference. Every term but s is separable by token, and every weight is data, known before the
first forward: in update steps with N tokens, m answers and P prompts, of which a group has N_g tokens and an answer n_i,

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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from recipe_utils.losses.chunks import ChunkedLoss, OutputLayer, compiled_for_all_lengths, sum_dtype
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.step import Targets

_CLIPS: Mapping[str, tuple[float | None, float | None]] = {
    "clipped": (0.2, 0.2),
    "sequence": (3e-4, 4e-4),
    "cispo": (None, 0.2),
    "reinforce": (None, None),
}
"""Kind -> default of ``clip_low`` and ``clip_high``; None where the kind has none."""
_DIVISORS = {"tokens": "answer_tokens", "answers": "answers", "constant": "answers", "prompts": "groups"}
_WEIGHTS = {**_DIVISORS, "constant": "answer_tokens"}
"""Normaliser -> column of each token's weight."""
_CORRECTIONS: Mapping[str | None, tuple[float | None, float | None]] = {
    None: (None, None),
    "truncate": (None, 2.0),
    "mask": (0.5, 5.0),
}
"""Correction -> default of its bounds."""
_SELECTS = "it selects tokens by their rank among others, so the gradient would depend on how samples are grouped"
_REFUSED = {
    **dict.fromkeys(("clip_cov", "kl_cov", "top_entropy"), _SELECTS),
    **dict.fromkeys(("ppo", "gae", "vapo"), "it needs a critic, which is not trained here"),
}
"""Kinds of other trainers that are refused, and the reason."""


class TemperedLogProbs(ChunkedLoss):
    """Loss module that returns the log-probability of each target token, of logits over its temperature, without gradients.

    For the arguments see :class:`recipe_utils.losses.chunks.ChunkedLoss`.
    """

    columns: Mapping[str, float | None] = {"temperatures": 1.0}

    def __init__(self, tokens_per_chunk: int = 2048, num_output_chunks: int = 8) -> None:
        super().__init__(tokens_per_chunk, num_output_chunks, IGNORE_INDEX, "loss")
        self._read, self._gradient = _read, _gradient

    def compile_chunks(self, backend: Any) -> None:
        """Compiles the arithmetic on logits, once for chunks of any length."""
        self._read, self._gradient = (compiled_for_all_lengths(each, backend) for each in (_read, _gradient))

    def forward(self, output: OutputLayer, hidden: Tensor, targets: Targets, backward_in_parts: bool = False) -> Tensor:
        """Returns log-probabilities [n] in nats, at least fp32."""
        return self.log_probs(output, *self.at_targets(hidden, targets), self.temperatures(targets))

    @torch.no_grad()
    def log_probs(self, output: OutputLayer, hidden: Tensor, labels: Tensor, temperatures: Tensor | None) -> Tensor:
        """Returns log-probabilities [n] of ``labels`` [n], for hidden states [n, d]."""
        log_probs = hidden.new_zeros(len(hidden), dtype=sum_dtype(hidden))

        def read_chunk(logits: Tensor, rows: slice, _: bool) -> tuple[Tensor, None]:
            log_probs[rows] = self._read(logits, labels[rows], None if temperatures is None else temperatures[rows])[0]
            return log_probs.new_zeros(1), None

        self.sum_over_chunks(output, hidden, read_chunk, 1)
        return log_probs

    @staticmethod
    def temperatures(targets: Targets) -> Tensor | None:
        """Returns temperatures [n]; None if all are 1."""
        return None if "temperatures" in targets.defaults else targets.values["temperatures"]


class PolicyLoss(TemperedLogProbs):
    """Policy gradients on given rollouts; see the table of :mod:`recipe_utils.policy.policy_losses`.

    Args:
        kind: ``clipped`` (GRPO, Dr. GRPO, DAPO), ``sequence`` (GSPO; parts of one rollout have a ratio each), ``cispo`` or
            ``reinforce``.
        clip_low, clip_high: bounds of the ratio, 1 - low and 1 + high. Default: 0.2; 3e-4 and 4e-4 for ``sequence``.
        normaliser: ``tokens``, ``answers``, ``constant`` or ``prompts``.
        tokens_per_answer: L of ``constant``, such as the sampler's maximum.
        kl: estimator of the KL to the reference. The gradient of ``k2`` is that of the KL itself on policy; as losses, ``k1`` has
            an expected gradient of 0 and ``k3`` that of the KL in the other direction (http://joschu.net/blog/kl-approx.html).
        kl_weight: its weight; 0 needs no reference.
        correction: corrects the difference to the sampler, by w: ``truncate`` (TIS) or ``mask`` (IcePop). Masked tokens stay in
            what the loss is divided by. It needs ``old: start``.
        correction_low, correction_high: bounds of w. Default: 2 at most; from 0.5 to 5 for ``mask``.
        old: ``file``: the sampler's log-probabilities, as far as the file has them; ``start``: the policy at the start of the round.
        tokens_per_chunk, num_output_chunks: see :class:`recipe_utils.losses.chunks.ChunkedLoss`.

    Raises:
        ValueError: a wrong value, or one without an effect.
    """

    totals: ClassVar = ("answer_tokens", "answers", "groups", "rewards", "equal_groups", "measured")
    """Tokens, answers, groups, rewards and groups of equal rewards of an update step, and tokens that are computed."""
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
        normaliser: str = "tokens",
        tokens_per_answer: int | None = None,
        kl: str = "k2",
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
            "kind": (kind, _CLIPS), "normaliser": (normaliser, _DIVISORS), "kl": (kl, ("k1", "k2", "k3")),
            "correction": (correction, _CORRECTIONS), "old": (old, ("file", "start")),
        }  # fmt: skip
        for name, (value, values) in choices.items():
            if value not in values:
                raise ValueError(f"loss.{name}={value}: unknown; set it to {_one_of(values)}")
        if (normaliser == "constant") != (tokens_per_answer is not None):
            text = "is the L of normaliser=constant, and has no effect on others; set both, or none"
            raise ValueError(f"loss.tokens_per_answer={tokens_per_answer}: it {text}")
        if tokens_per_answer is not None and tokens_per_answer < 1:
            raise ValueError(f"loss.tokens_per_answer={tokens_per_answer}: it must be at least 1")
        if kl_weight < 0:
            raise ValueError(f"loss.kl_weight={kl_weight}: it must be at least 0")
        if correction is not None and old == "file":
            text = "has no effect on old=file, which is the sampler's policy itself; set loss.old=start"
            raise ValueError(f"loss.correction={correction}: it {text}")
        self.kind, self.normaliser, self.kl, self.kl_weight = kind, normaliser, kl, kl_weight
        self.correction, self.old, self._factor = correction, old, 1 / (tokens_per_answer or 1)
        self._low, self._high = _bounds("clip", (clip_low, clip_high), f"kind={kind}", _CLIPS[kind])
        bounds = (correction_low, correction_high), f"correction={correction}", _CORRECTIONS[correction]
        self._least, self._most = _bounds("correction", *bounds)
        # What it takes of samples, and returns.
        needed = {"advantages", _WEIGHTS[normaliser], _DIVISORS[normaliser]} - {"answer_tokens"}
        others = dict.fromkeys(("answers", "groups", "equal_groups", "teacher"), 0.0)
        unknown = dict.fromkeys(("logprobs", "ref_logprobs", "rewards"), torch.nan)
        defaults = {"advantages": 0.0, "temperatures": 1.0, "answer_tokens": 1.0, "measured": 1.0, **others, **unknown}
        self.columns = {name: None if name in needed else default for name, default in defaults.items()}
        self.divisor = _DIVISORS[normaliser]
        clips = ("clipped_low", self._low), ("clipped_high", self._high)
        self.sums = (
            "loss", "entropy", "ratio", "kl_sampler", *(name for name, bound in clips if bound is not None),
            *["corrected"] * (correction is not None), *["kl_reference"] * self.has_kl,
        )  # fmt: skip
        self.largest_ratio: Tensor | None = None
        """Largest ratio of a measured token since it was last set to None, []."""
        self._returns_log_probs = False

    @property
    def has_kl(self) -> bool:
        """Returns True with a KL term, which also groups of equal rewards have."""
        return self.kl_weight > 0

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
        given, temperatures = self._given(targets, sum_dtype(hidden)), self.temperatures(targets)
        if self.kind == "sequence":
            # The ratio of an answer is known once all of its tokens are: one more projection, without gradients.
            now = self.log_probs(output, hidden, labels, temperatures)
            given = given._replace(ratios=_sequence_ratios(now, given.old, targets))
        by_target = self.new_losses(hidden)

        def chunk_loss(logits: Tensor, rows: slice, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
            tempered = None if temperatures is None else temperatures[rows]
            log_probs, entropies, probabilities = self._read(logits, labels[rows], tempered)
            del logits
            # The gradient of each log-probability, which is a leaf here, then that of the logits.
            with torch.enable_grad():
                leaf = log_probs.detach().requires_grad_()
                of_chunk = given.of_rows(rows)
                terms, metrics = self._terms(leaf, of_chunk)
                loss = (of_chunk.weights * terms).sum()
                (slopes,) = torch.autograd.grad(loss, leaf) if needs_gradient else (None,)
            if by_target is not None:
                by_target[rows] = terms.detach()
            metrics = {"entropy": entropies, **metrics}
            sums = [loss.detach(), *((of_chunk.measured * metrics[name]).sum() for name in self.sums[1:])]
            if slopes is None:
                return torch.stack(sums), None
            slopes = slopes if tempered is None else slopes / tempered.to(slopes.dtype)
            return torch.stack(sums), self._gradient(probabilities, labels[rows], slopes)

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
        if given.ratios is None:
            ratio = (log_probs - old).exp()
        else:
            ratio = given.ratios * (log_probs - now).exp()
        # The policy term of the kind, minimised.
        low, high = 1 - (self._low or 0), 1 + (self._high or 0)
        if self.kind == "reinforce":
            terms = -advantages * log_probs
        elif self.kind == "cispo":
            terms = -ratio.detach().clamp(max=high) * advantages * log_probs
        else:
            terms = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        # The sampler was another policy than `old`: its tokens weigh more or less, or nothing.
        mismatch = (old - sampled).exp()
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
            "corrected": ~is_within,
        }
        # The reference pulls with the same weight of each token, uncorrected.
        if self.has_kl:
            difference = log_probs - given.reference
            kl = {
                "k1": lambda: difference,
                "k2": lambda: difference.square() / 2,
                "k3": lambda: torch.expm1(-difference) + difference,
            }[self.kl]()
            terms, metrics["kl_reference"] = terms + self.kl_weight * kl, kl.detach()
        if len(ratio):
            largest = (ratio * given.measured).max()
            self.largest_ratio = largest if self.largest_ratio is None else self.largest_ratio.maximum(largest)
        return terms, metrics


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
    ratios: Tensor | None = None
    """Ratio of each target's answer, of ``sequence``."""

    def of_rows(self, rows: slice) -> "_Given":
        """Returns those of some targets [c]."""
        return _Given(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]


def _sequence_ratios(now: Tensor, old: Tensor, targets: Targets) -> Tensor:
    """Returns exp(mean over the sequence of now - old) of each target's sequence [n], for log-probabilities [n]."""
    assert targets.samples is not None
    of_sequences = partial(now.new_zeros, len(targets.samples))
    owners = targets.of_targets(torch.arange(len(targets.samples), device=now.device))
    differences = torch.where(old.isnan(), 0.0, now - old)
    sums = of_sequences().index_add(0, owners, differences)
    numbers = of_sequences().index_add(0, owners, torch.ones_like(differences))
    return (sums / numbers.clamp(min=1)).exp().index_select(0, owners)


def _read(logits: Tensor, labels: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities [c] of labels [c], entropies [c] and probabilities [c, v], for logits [c, v]."""
    if temperatures is not None:
        logits = logits / temperatures.to(logits.dtype).unsqueeze(1)
    normalizers = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(1, labels.unsqueeze(1)).squeeze(1) - normalizers
    probabilities = (logits - normalizers.unsqueeze(1)).exp_()
    return log_probs, normalizers - torch.einsum("cv,cv->c", probabilities, logits), probabilities


def _gradient(probabilities: Tensor, labels: Tensor, slopes: Tensor) -> Tensor:
    """Turns probabilities [c, v] into the gradient of logits, for that of each log-probability [c]."""
    slopes = slopes.unsqueeze(1)
    return probabilities.mul_(-slopes).scatter_add_(1, labels.unsqueeze(1), slopes)


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
        if value is not None and value < 0:
            raise ValueError(f"loss.{name}_{side}={value}: it must be at least 0")
        bounds.append(default if value is None else float(value))
    return bounds[0], bounds[1]


def _one_of(values: Any) -> str:
    return f"one of {', '.join('null' if value is None else str(value) for value in values)}"
