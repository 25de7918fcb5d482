"""Ratios of an update step: the largest as a metric, and warnings that name what makes ratios differ from 1.

Example: the rows of a file were sampled at the temperature 0.5 and have no ``temperature``. In the first update step, where
the policy is the sampler's, the mean ratio is 5.5: one warning names the answer with the largest. An engine returns -120 for one
token: its ratio, e^119, is bounded, and a warning names its line.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recipe_utils.parallel.to_device import ToHostLater
from recipe_utils.policy.policy_losses import MAX_EXPONENT, PolicyLoss, Seen
from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.run import Run
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.samples import facts_of, unread
from recipe_utils.update_steps.step import UpdateStep

_TOLERANCE = 0.05
"""Distance from 1 of a mean ratio, and from 0 of its mean logarithm, that kernels and bf16 do not explain."""


class Ratios(Part):
    """Returns the metric ``ratio_max``, and warns of ratios that are bounded, and of a policy that is not the sampler's.

    Both once in a training. On a device, numbers are read after the next update step is enqueued.
    """

    def __init__(self, run: Run, loss_fn: PolicyLoss, loader: UpdateStepLoader) -> None:
        self._run, self._loss_fn, self._loader = run, loss_fn, loader
        self._late = ToHostLater(run.ranks.device)
        self._warned = set[str]()
        self._follows_sampling = False
        """The next update step is the first one of a round; of a file, of the training."""

    def begin(self, epoch: int) -> None:
        """Reads the last update step of the epoch before, while its samples can be read."""
        self._late.read()
        has_rounds = bool(facts_of(self._loader.dataset.dataset).comes_later)
        is_sampled = epoch == 0 or has_rounds
        self._follows_sampling = is_sampled and self._run.state.samples_consumed == 0

    def after(self, step: UpdateStep) -> Mapping[str, Tensor]:
        """Returns the largest ratio over all ranks; nothing if no group was computed."""
        self._late.read()
        ranks = self._run.ranks
        mine = self._loss_fn.take_seen(ranks.device)
        of_ranks = [torch.empty_like(mine) for _ in range(ranks.world_size)]
        dist.all_gather(of_ranks, mine)
        if not step.totals["measured"]:
            return {}
        seen = torch.stack(of_ranks)
        self._late.hold(seen, partial(self._judge, follows_sampling=self._follows_sampling))
        self._follows_sampling = False
        return {"ratio_max": seen[:, 0].max()}

    def close(self, error: BaseException | None) -> None:
        """Reads the last update step."""
        if error is None:
            self._late.read()

    def _judge(self, on_host: Tensor, follows_sampling: bool) -> None:
        """Warns of what was seen on the ranks [r, k]."""
        seen = Seen(*max(on_host.tolist(), key=lambda each: each[1]))
        ratios, differences, num_tokens = on_host[:, -3:].sum(0).tolist()
        if seen.difference > MAX_EXPONENT and "bound" not in self._warned:
            self._warned.add("bound")
            text = f"its ratio, e^{seen.difference:.0f}, counts as e^{MAX_EXPONENT:.0f}"
            self._run.log.warn(f"{self._name(seen)}; {text}; sample the answer again, or remove it")
        is_far = abs(ratios - num_tokens) > _TOLERANCE * num_tokens or abs(differences) > _TOLERANCE * num_tokens
        if follows_sampling and is_far and "mean" not in self._warned:
            self._warned.add("mean")
            means = ratios / num_tokens, differences / num_tokens
            self._run.log.warn(
                "logprobs of the file are not those of the model in the first update step after sampling: the mean ratio is "
                f"{means[0]:.3g} instead of 1, its mean logarithm {means[1]:.3g} instead of 0; write the temperature "
                "that they were sampled at, beside their own tokens, and sample with the weights that training starts from. "
                f"The largest: {self._name(seen)}"
            )

    def _name(self, seen: Seen) -> str:
        """Returns a token in words, with its place in its file if the dataset has it."""
        index, label = int(seen.item), int(seen.label)
        place = f"{self._loader.dataset.name_of(index)}: token {label}"
        with suppress(Exception):  # of a dataset of one's own
            place = place_of(unread(self._loader.dataset.dataset)[index], label, seen.sampled) or place
        return f"{place} has the log-probability {seen.now:.4g}, and {seen.sampled:.4g} in the file"


def place_of(sample: Mapping[str, Any], label: int, log_prob: float) -> str | None:
    """Returns the place of a trained token that the sampler gave ``log_prob``, such as ``line 2 of a.jsonl: token 9``."""
    for number, sequence in enumerate(sample["sequences"]):
        is_given = np.isclose(sequence["logprobs"], log_prob, rtol=1e-6, atol=0)
        are_found = is_given & (np.asarray(sequence["labels"]) == label)
        if are_found.any():
            name = sample["rows"][number] if "rows" in sample else f"sequence {number}"
            return f"{name}: token {int(are_found.argmax())} (id {label})"
    return None
