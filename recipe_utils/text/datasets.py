"""Builds the dataset of a config, or the mixture of a list of them."""

import logging
import os
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune.datasets import ConcatDataset

import recipe_utils.text.torchtune_messages  # noqa: F401  corrects torchtune
from recipe_utils.settings.components import may_mean_subset, split_entry
from recipe_utils.text.mixture import Mixture, entries_of
from recipe_utils.torchtune_names import instantiate, log_rank_zero
from recipe_utils.update_steps.samples import unread


def load_dataset(
    cfg: DictConfig | ListConfig, tokenizer: Any = None, check: Callable[[Any], None] | None = None
) -> Any:
    """Instantiates a dataset from a component, or from a list of components.

    A list with names or weights is a :class:`.Mixture`; others are concatenated. ``tokenizer`` is the positional argument
    of each. ``check`` raises ValueError if the first sample is of a wrong kind.
    """
    given = () if tokenizer is None else (tokenizer,)
    if not isinstance(cfg, ListConfig):
        dataset = _instantiate(cfg, *given)
    else:
        configs: Any = OmegaConf.to_container(cfg, resolve=True)
        components, mixture_keys = zip(*map(split_entry, configs), strict=True)
        for name in (each["name"] for each in configs if may_mean_subset(each)):
            text = f"name={name} is the name of a dataset in the log; set subset={name} for a subset of the hub"
            log_rank_zero(text, logging.WARNING)
        datasets = [_instantiate(OmegaConf.create(component), *given) for component in components]
        dataset = Mixture(datasets, entries_of(configs)) if any(mixture_keys) else ConcatDataset(datasets)
    if check is not None:
        try:
            sample = unread(dataset)[0]
        except Exception:  # an empty dataset or a bad sample is reported when it is loaded
            return dataset
        check(sample)
    return dataset


def _instantiate(cfg: DictConfig, *given: Any) -> Any:
    """Builds a dataset; raises ValueError with the files if the library ``datasets`` cannot read them."""
    try:
        dataset = instantiate(cfg, *given)
    except Exception as error:
        if isinstance(error, OSError):
            missing = str(error.filename)
            for name in (str(key) for key, value in cfg.items() if str(value) == missing):
                raise ValueError(f"{name}={missing}: {os.strerror(error.errno or 0)}") from None
        # Other errors, such as of a wrong argument, are reported as they are.
        is_of_datasets = type(error).__module__.partition(".")[0] == "datasets"
        if not is_of_datasets and not isinstance(error, StopIteration):
            raise
        # The library's own message names neither file nor reason; those are in the errors that caused it.
        causes = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)  # type: ignore[arg-type]
        reason = "; ".join(dict.fromkeys(str(cause) for cause in causes[1:] if str(cause))) or "it is empty"
        raise ValueError(f"{cfg.get('data_files') or cfg.get('source')} cannot be read: {reason}") from error
    try:
        len(dataset)
    except TypeError:
        raise ValueError(
            f"a {type(getattr(dataset, '_data', dataset)).__name__} has no length; set it to a map-style dataset "
            "(streaming=False: files are memory-mapped, not loaded), because a shuffle buffer cannot be resumed exactly"
        ) from None
    return dataset
