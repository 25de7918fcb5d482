"""Builds loaders from datasets: checks, order of the samples, budget of the rows."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from recipe_utils.data.inspect_samples import draws_samples, report_of
from recipe_utils.data.search import SearchedBudget
from recipe_utils.parallel.process_group import agree_on_length
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError, Problem, build, naming
from recipe_utils.text.collator import RowCollator
from recipe_utils.text.mixture import Mixture, MixtureOrder, load_dataset
from recipe_utils.torchtune_names import instantiate, log_rank_zero
from recipe_utils.update_steps.loader import RowBudget, UpdateStepLoader
from recipe_utils.update_steps.objective import Collator
from recipe_utils.update_steps.order import Order, ShuffledOrder
from recipe_utils.update_steps.permutation import NUM_IN_MEMORY
from recipe_utils.update_steps.samples import CheckedDataset, facts_of, unread
from recipe_utils.update_steps.settings import DataSettings


def validates_dataset(cfg: DictConfig) -> bool:
    """Returns True if training validates. Warns if ``dataset_val`` is unused."""
    validates = cfg.get("run_val_every_n_steps") is not None
    if not validates and cfg.get("dataset_val") is not None:
        text = "dataset_val: not used, because run_val_every_n_steps is not set"
        log_rank_zero(text, logging.WARNING)
    if validates and cfg.get("dataset_val") == cfg.dataset:
        text = "dataset_val: it is dataset, so validation is on samples that are trained on"
        log_rank_zero(text, logging.WARNING)
    return validates and cfg.get("dataset_val") is not None  # without one, a recipe measures something else


def load_datasets(cfg: DictConfig, tokenizer: Any, check: Callable[[Any], None] | None = None) -> tuple[Any, Any]:
    """Builds ``dataset`` and, if training validates, ``dataset_val``; else None; see :func:`.load_dataset`.

    Raises ConfigError.
    """
    validates, load = validates_dataset(cfg), partial(load_dataset, tokenizer=tokenizer, check=check)
    dataset = build("dataset", load, cfg.dataset)
    return dataset, build("dataset_val", load, cfg.dataset_val) if validates else None


def build_loaders(
    dataset: Any,
    dataset_val: Any,
    collator: RowCollator,
    settings: DataSettings,
    ranks: Ranks,
    num_to_run: Callable[[int], int] | None = None,
) -> tuple[UpdateStepLoader, UpdateStepLoader | None]:
    """Builds the loaders of rows of ``dataset`` and, unless None, of ``dataset_val``.

    ``num_to_run`` is that of a pipeline's schedule. Raises ConfigError for problems of both datasets.
    """
    budget = SearchedBudget(collator) if settings.is_searched else RowBudget(collator)
    loader = build_loader(dataset, budget, settings, ranks, "dataset", num_to_run)
    if dataset_val is None:
        return loader, None
    # Validation takes the budget that training has found so far; it searches for none.
    follow = (lambda: budget.tokens) if settings.is_searched else None
    settings_val = settings.of_validation()
    budget_val = RowBudget(replace(collator, settings=settings_val), follow)
    return loader, build_loader(dataset_val, budget_val, settings_val, ranks, "dataset_val", num_to_run)


def build_loader(
    dataset: Any,
    budget: RowBudget,
    settings: DataSettings,
    ranks: Ranks,
    name: str = "dataset",
    num_to_run: Callable[[int], int] | None = None,
) -> UpdateStepLoader:
    """Builds a loader of a map-style dataset, the same on all ranks.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        budget: collator of its samples.
        settings: data settings.
        ranks: ranks of the job.
        name: config key of the dataset, for errors. Samples of a mixture with weights are drawn for ``dataset``
            only. Loaders of other keys share a group of ranks, so only one of them is iterated over at a time.
        num_to_run: see :class:`.UpdateStepLoader`.

    Raises:
        ConfigError: the dataset is empty, has nothing to train on, forms no update step, or differs in length
            between ranks.
    """
    is_training, collator = name == "dataset", budget.collator()
    group = ranks.prefetch_group if is_training else ranks.validation_group
    checked = CheckedDataset(dataset, name, collator.prepare, settings.on_bad_sample == "skip", collator.noun)
    # First samples are read before weights load, because mistakes in data are the most frequent ones.
    with naming(name):
        if agree_on_length(len(checked), group) == 0:
            raise ValueError("it has 0 samples; at least 1 is needed")
        checked = _inspected(checked, collator, settings, ranks, is_training)
    # What a resume must find again: the samples, and the order in which they come.
    order = build_order(checked, settings, ranks.dp_degree, is_training)
    # An own order may have no fingerprint: that of the order around which it is built, and its arguments.
    fingerprint = {**_fingerprint_of(checked, settings, ranks.dp_degree), **order.fingerprint()}
    fingerprint |= {f"order.{key}": value for key, value in (settings.order or {}).items()}
    checked = replace(checked, fingerprint=fingerprint)
    order = build("order", build_own_order, settings.order, order, unread(dataset))
    numbers = settings.num_workers, settings.prefetch_update_steps
    return UpdateStepLoader(checked, order, budget, ranks, group, *numbers, num_to_run)


def build_order(dataset: CheckedDataset, settings: DataSettings, dp_degree: int, is_training: bool = True) -> Order:
    """Returns the order of the config: by weight if the dataset is a mixture with weights, else shuffled."""
    size, most = settings.samples_per_update_step(dp_degree), settings.max_steps_per_epoch
    mixture = dataset.sources
    if is_training and isinstance(mixture, Mixture) and mixture.weights is not None:
        per_epoch = (settings.mixture or {}).get("samples_per_epoch")
        order = MixtureOrder(mixture, size, per_epoch, most, settings.shuffle, settings.data_seed)
        if problems := [*order.problems(dataset.name)]:
            raise ConfigError(*problems)
        return order
    with naming("last_update_step"):
        drops = settings.last_update_step == "drop"
        return ShuffledOrder(len(dataset), size, settings.shuffle, settings.data_seed, drops, most)


def build_own_order(component: Mapping[str, Any] | None, order: Order, dataset: Any) -> Order:
    """Builds the order of the config key ``order`` around ``order``, that of the other keys; None returns the latter.

    Raises ValueError if it is no order, or its first or last update step of epoch 0 is no part of ``dataset``.
    """
    if component is None:
        return order
    own: Order = instantiate(OmegaConf.create(dict(component)), order, dataset)
    name = f"order._component_={component['_component_']}"
    methods = "num_steps", "samples", "end", "fingerprint"
    if missing := [method for method in methods if not callable(getattr(own, method, None))]:
        raise ValueError(f"{name}: it has no {', '.join(missing)}; let it inherit from {Order.__module__}.Order")
    steps = sorted({0, own.num_steps(0) - 1})
    samples, ends = ([call(0, step) for step in steps if step >= 0] for call in (own.samples, own.end))
    are_indices = [isinstance(s, np.ndarray) and s.size and s.min() >= 0 and s.max() < len(dataset) for s in samples]
    if steps[0] < 0 or not all(are_indices) or [0, *ends] != sorted({0, *ends}):
        text = f"samples of update steps {steps} are {samples} and end at {ends}; return arrays of indices below "
        raise ValueError(f"{name}: {text}{len(dataset)}, ends that ascend from above 0, and at least one update step")
    return own


def _inspected(
    dataset: CheckedDataset, collator: Collator, settings: DataSettings, ranks: Ranks, is_training: bool
) -> CheckedDataset:
    """Returns the dataset with what its first samples show; unchanged if there are none before an epoch begins."""
    if facts_of(dataset.dataset).comes_later:
        return dataset
    draws = draws_samples(dataset)
    if draws and settings.prefetch_update_steps and not settings.num_workers:
        text = (
            f"samples of {dataset.name} draw from a global random generator, as training does at the same "
            "time, so no run could be repeated or resumed; set num_workers to 1 or more"
        )
        raise ConfigError(Problem("num_workers", text, 0))
    # Of a mixture each source is recognized on resume; of a validation nothing is.
    dataset, source_lengths = replace(dataset, draws=draws), [len(dataset)]
    if isinstance(dataset.sources, Mixture) and dataset.sources.weights is not None:
        source_lengths = [*dataset.sources.lengths]
    report = report_of(dataset, collator, source_lengths if is_training else (), is_training and ranks.is_zero)
    return replace(dataset, report=report)


def _fingerprint_of(dataset: CheckedDataset, settings: DataSettings, dp_degree: int) -> dict[str, Any]:
    """Returns values that must be equal for update steps to contain the same samples, besides those of the order."""
    is_lazy = settings.shuffle and len(dataset) > NUM_IN_MEMORY
    hashes = {f"{dataset.name}{key}": value for key, value in facts_of(dataset.dataset).content.items()}
    return {
        "num_samples": len(dataset),
        "hash_of_samples": dataset.report.hash_of_samples,
        "other_content_hash": dataset.report.other_content_hash,
        **({"content_hash": hashes} if hashes else {}),
        **({"order": "feistel"} if is_lazy else {}),
        "global_batch_size": settings.samples_per_update_step(dp_degree),
        "shuffle": settings.shuffle,
        "data_seed": settings.data_seed,
        "last_update_step": settings.last_update_step,
    }
