"""Policy gradients as an objective of a recipe: rows of groups, what the loss needs beside them, and what is logged.

Example: a file without log-probabilities, of 4 update steps, needs the policy at the start of the round, and with
``loss.kl_weight: 0.1`` a reference; its groups of equal rewards are computed, because they have a KL term.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe_utils.data.collators import text_collator
from recipe_utils.models.adapters.lora import find_adapters
from recipe_utils.policy.policy_losses import PolicyLoss
from recipe_utils.policy.rollouts import OF_REWARDS, check_whole_answers, shorten_equal_group
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.collator import RowCollator
from recipe_utils.text.limits import ModelLimits
from recipe_utils.torchtune_names import instantiate
from recipe_utils.training.log import Reported
from recipe_utils.training.setup import Built
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.objective import Declaration
from recipe_utils.update_steps.samples import Facts, facts_of
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
    built: Built, limits: ModelLimits, datasets: Sequence[Any], loss_fn: PolicyLoss, declared: Declaration
) -> RowCollator:
    """Returns the collator of groups: packed rows compute a group's prompt once, others have a row for each answer.

    Those of ``kind: sequence`` refuse answers in parts. Raises ConfigError for a correction or a teacher that has no effect on
    these datasets.
    """
    given = _facts_of_all(built, loss_fn, datasets)
    settings, tokenizer = built.settings.data, built.tokenizer
    trees = "dataset", "set microbatching=least_padding, where each answer is a row with its prompt"
    has_trees = any(facts.has_sequences for facts in given)
    ignored = loss_fn.ignore_index
    collator = text_collator(settings, tokenizer, ignored, limits, has_trees, declared, trees=trees)
    # Groups without advantages cost no forward, unless they have a KL term.
    changes = [check_whole_answers] * (loss_fn.kind == "sequence") + [shorten_equal_group] * (not loss_fn.has_kl)
    return replace(collator, reader=replace(collator.reader, has_fingerprints=True, changes=changes))


def _facts_of_all(built: Built, loss_fn: PolicyLoss, datasets: Sequence[Any]) -> Sequence[Facts]:
    """Returns the facts of datasets. Raises ConfigError for what has no effect on them, as far as their fields are known."""
    given = [facts_of(dataset) for dataset in datasets if dataset is not None]
    if problems := [*_without_effect(built, loss_fn, given)]:
        raise ConfigError(*problems)
    return given


def _without_effect(built: Built, loss_fn: PolicyLoss, given: Sequence[Facts]) -> Iterator[Problem]:
    """Yields a cache that cannot be filled, what no sampler writes, a correction of nothing, and a teacher that is the student."""
    cfg, data, rounds = built.cfg, built.settings.data, [each for facts in given for each in facts.comes_later]
    if cfg.get("reference") == "cached" and (data.max_ranks_per_row > 1 or rounds):
        text = "is filled before training, with whole answers of all epochs, and rounds come later"
        if data.max_ranks_per_row > 1:
            text = "has whole answers, of which a rank has a share; remove max_ranks_per_row"
        yield Problem("reference", f"a cache {text}; or set live or offload", "cached")
    sampler, advantages = cfg.get("sampler"), {each.advantage for each in rounds}
    if sampler is not None and "given" in advantages:
        text = "a sampler writes rewards and no advantages; set mean_std, or take sampler out"
        yield Problem("dataset.advantage", text, "given")
    if sampler is not None and sampler.get("group_size") == 1 and advantages & OF_REWARDS.keys():
        text = f"one answer has nothing to compare it with (dataset.advantage={min(advantages)}); set it to 2 or more"
        yield Problem("sampler.group_size", text, 1)
    known = [(facts.fields, facts.needs_reference) for facts in given if facts.fields is not None]
    if loss_fn.correction is not None and any("logprobs" not in fields for fields, _ in known):
        text = "the dataset has no logprobs, so there is no sampler to correct; write them, or take correction out"
        yield Problem("loss.correction", text, loss_fn.correction)
    if any(needs_reference and "ref_logprobs" not in fields for fields, needs_reference in known):
        instead, own = "write the teacher's ref_logprobs", cfg.checkpointer
        has_adapters = bool(find_adapters(built.meta_model).modules)
        if has_adapters or _weights_of(own) == _weights_of(cfg.get("ref_checkpointer") or own):
            instead = instead if has_adapters else f"set ref_checkpointer to the teacher, or {instead}"
            text = f"the teacher is the model that training starts from, so it would learn nothing; {instead}"
            yield Problem("dataset.advantage", text, "teacher")


def _weights_of(checkpointer: Mapping[str, Any]) -> tuple[Path, Any]:
    """Returns folder and files of the weights that the config of a checkpointer reads."""
    return Path(checkpointer["checkpoint_dir"]).resolve(), checkpointer.get("checkpoint_files")


def problems_with_loss(loss: Mapping[str, Any], data: DataSettings) -> Iterator[Problem]:
    """Yields a kind of loss that rows over several ranks do not have."""
    if loss.get("kind") == "sequence" and data.max_ranks_per_row > 1:
        text = "a rank of a shared row has no whole answers, whose mean is the ratio; remove max_ranks_per_row"
        yield Problem("loss.kind", text, "sequence")


def needs_reference(built: Built, loss_fn: PolicyLoss, datasets: Sequence[Any]) -> bool:
    """Returns True if the loss takes log-probabilities of a reference that a file does not have.

    Raises ConfigError for a correction or a teacher that has no effect on the first round.
    """
    given = _facts_of_all(built, loss_fn, datasets)
    takes = loss_fn.has_kl or any(facts.needs_reference for facts in given)
    return takes and not all("ref_logprobs" in (facts.fields or ()) for facts in given)


def needs_start(loss_fn: PolicyLoss, loader: UpdateStepLoader) -> bool:
    """Returns True if a ratio is to the policy at the start of a round, in update steps after the first one."""
    has_logprobs = "logprobs" in (facts_of(loader.dataset.dataset).fields or ())
    return loader.order.num_steps(0) > 1 and (loss_fn.old == "start" or not has_logprobs)


def counts_of(step: UpdateStep) -> dict[str, float | None]:
    """Returns what is logged of an update step besides the loss's sums, known before its first forward."""
    totals, has_rewards = step.totals, not math.isnan(step.totals["rewards"])  # NaN where a sample has none
    num_answers, num_masked, num_groups = (round(totals[name]) for name in ("answers", "masked", "groups"))
    return {
        "num_groups": num_groups or None,
        "num_answers": num_answers or None,
        "num_masked": num_masked if num_answers else None,
        "num_tokens": round(totals["answer_tokens"]),
        "mean_reward": totals["rewards"] / (num_answers + num_masked) if num_answers and has_rewards else None,
        "equal_groups": round(totals["equal_groups"]) / num_groups if num_groups and has_rewards else None,
    }
