"""Policy gradients as an objective of a recipe: rows of groups, what the loss needs beside them, and what is logged.

Example: a file without log-probabilities, of 4 update steps, needs the policy at the start of the round, and with
``loss.kl_weight: 0.1`` a reference; its groups of equal rewards are computed, because they have a KL term.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from recipe_utils.data.collators import text_collator
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.policy.policy_losses import PolicyLoss
from recipe_utils.policy.rollouts import WithoutEqualGroups
from recipe_utils.settings.problems import Problem
from recipe_utils.text.collator import RowCollator
from recipe_utils.text.limits import ModelLimits
from recipe_utils.text.trees import makes_trees
from recipe_utils.torchtune_names import instantiate
from recipe_utils.training.log import Reported
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.objective import Declaration
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import UpdateStep

ROLLOUTS = Reported(
    {"measured": "tokens", "real_tokens": "real_tokens"},  # without what stands for groups of equal rewards
    validation=("val_reward", "val_loss"),
    metrics=("mean_reward", "loss"),
)
"""Units and main metrics."""


def build_policy_loss(cfg: DictConfig) -> PolicyLoss:
    """Builds the loss. Raises ValueError if it is no policy loss: the recipe logs and divides by what that counts."""
    loss_fn = instantiate(cfg)
    if not isinstance(loss_fn, PolicyLoss):
        text = "set it to recipe_utils.policy.PolicyLoss or a class of it; full_finetune_update_step takes other losses"
        raise ValueError(f"loss: {type(loss_fn).__name__} is no PolicyLoss; {text}")
    return loss_fn


def group_collator(
    settings: DataSettings,
    tokenizer: Any,
    limits: ModelLimits,
    datasets: Iterable[Any],
    loss_fn: PolicyLoss,
    declared: Declaration,
) -> RowCollator:
    """Returns the collator of groups: packed rows compute a group's prompt once, others have a row for each answer."""
    trees = "dataset", "set microbatching=least_padding, where each answer is a row with its prompt"
    has_trees = any(map(makes_trees, datasets))
    ignored = loss_fn.ignore_index
    return text_collator(settings, tokenizer, ignored, limits, has_trees, declared, trees=trees, pads_sequences=True)


def problems_with_loss(loss: Mapping[str, Any], data: DataSettings) -> Iterator[Problem]:
    """Yields a kind of loss that rows over several ranks do not have."""
    if loss.get("kind") == "sequence" and data.max_ranks_per_row > 1:
        text = "a rank of a shared row has no whole answers, whose mean is the ratio; remove max_ranks_per_row"
        yield Problem("loss.kind", text, "sequence")


def without_equal_groups(datasets: tuple[Any, Any], loss_fn: PolicyLoss) -> tuple[Any, Any]:
    """Returns datasets whose groups without advantages cost no forward, unless they have a KL term. None stays None.

    Those of a loss whose ratio is of whole answers refuse answers in several parts.
    """
    keeps_equal, is_of_answers = loss_fn.has_kl, loss_fn.kind == "sequence"
    if keeps_equal and not is_of_answers:
        return datasets
    dataset, val = (each if each is None else WithoutEqualGroups(each, keeps_equal, is_of_answers) for each in datasets)
    return dataset, val


def needs_reference(loss_fn: PolicyLoss, *datasets: Any) -> bool:
    """Returns True if the loss takes log-probabilities of a reference that a file does not have."""
    given = [each for dataset in datasets if dataset is not None for each in _sources(dataset)]
    takes = loss_fn.has_kl or any(getattr(each, "advantage", "") == "teacher" for each in given)
    return takes and not all(_has(each, "ref_logprobs") for each in given)


def needs_start(loss_fn: PolicyLoss, loader: UpdateStepLoader) -> bool:
    """Returns True if a ratio is to the policy at the start of a round, in update steps after the first one."""
    has_logprobs = all(_has(each, "logprobs") for each in _sources(loader.dataset.dataset))
    return loader.order.num_steps(0) > 1 and (loss_fn.old == "start" or not has_logprobs)


def counts_of(step: UpdateStep) -> dict[str, float | None]:
    """Returns what is logged of an update step besides the loss's sums, known before its first forward."""
    totals, has_rewards = step.totals, not math.isnan(step.totals["rewards"])  # NaN where a sample has none
    num_answers, num_groups = round(totals["answers"]), round(totals["groups"])
    return {
        "num_groups": num_groups or None,
        "num_answers": num_answers or None,
        "num_tokens": round(totals["answer_tokens"]),
        "mean_reward": totals["rewards"] / num_answers if num_answers and has_rewards else None,
        "equal_groups": round(totals["equal_groups"]) / num_groups if num_groups and has_rewards else None,
    }


def take_largest_ratio(loss_fn: PolicyLoss, ranks: Ranks) -> Tensor:
    """Returns the largest ratio since the last call, over all ranks, []."""
    largest = torch.zeros((), dtype=torch.float64, device=ranks.device)
    if loss_fn.largest_ratio is not None:
        largest, loss_fn.largest_ratio = loss_fn.largest_ratio.double(), None
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


def _sources(dataset: Any) -> Iterator[Any]:
    """Yields the datasets that a dataset consists of or transforms."""
    inner = getattr(dataset, "_datasets", None) or [getattr(dataset, "dataset", None)]
    if inner == [None]:
        yield dataset
    for each in filter(None.__ne__, inner):
        yield from _sources(each)


def _has(dataset: Any, field: str) -> bool:
    with suppress(AttributeError):  # of a dataset of one's own
        return field in dataset.has
    return False
