"""Datasets of a config, and mixtures whose shares are exact in every update step.

Example: with weights of 7 and 3 an update step of 4 samples owes the datasets 2.8 and 1.2. The whole parts, 2 and 1,
leave one sample, which goes to the dataset that is owed most; what remains is carried. Five update steps contain 3 + 1,
3 + 1, 2 + 2, 3 + 1 and 3 + 1 samples, 14 and 6 in all. The samples of an update step depend on its number alone, so they
are the same on any layout and after a resume.
"""

import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune.datasets import ConcatDataset

import recipe_utils.text.torchtune_messages  # noqa: F401  corrects torchtune
from recipe_utils.settings.components import may_mean_subset, split_entry
from recipe_utils.settings.problems import Problem
from recipe_utils.torchtune_names import instantiate, log_rank_zero
from recipe_utils.update_steps.order import Order
from recipe_utils.update_steps.permutation import NUM_IN_MEMORY, epoch_permutation, seed_of
from recipe_utils.update_steps.samples import NO_DATASET, Facts, facts_of, merged, unread
from recipe_utils.update_steps.step import Targets

_STEPS_PER_STATE = 64
"""Update steps between stored states, from which those between are computed."""


class Mixture(ConcatDataset):
    """Datasets one after the other, with their ``entries`` of the config, see :func:`entries_of`."""

    def __init__(self, datasets: Sequence[Any], entries: Sequence[Any]) -> None:
        super().__init__(list(datasets))
        self.lengths = tuple(map(len, datasets))
        self.starts: tuple[int, ...] = tuple(np.cumsum([0, *self.lengths[:-1]]).tolist())
        self.names: tuple[str, ...] = tuple(str(entry["name"]) for entry in entries)
        self.loss_weights = tuple(float(entry.get("loss_weight", 1.0)) for entry in entries)
        weights = [entry.get("weight") for entry in entries]
        self.weights = None if None in weights else [Fraction(str(weight)) for weight in weights]
        """Weight of each dataset; None if the datasets are concatenated."""

    def __getitem__(self, index: int) -> Any:
        """Returns a sample, with the ``loss_weight`` of its dataset as a weight of its targets."""
        return _weighted(super().__getitem__(index), self.loss_weights[self.dataset_of(index)])

    def facts(self) -> Facts:
        """Returns those of its datasets, by name."""
        facts = merged(dict(zip(self.names, map(facts_of, self._datasets), strict=True)))
        return facts._replace(sources=self)

    def dataset_of(self, index: int) -> int:
        """Returns the position in the list of the dataset that a sample is from."""
        return bisect_right(self.starts, index) - 1

    def of_targets(self, targets: Targets) -> np.ndarray:
        """Returns the dataset of each target [n]. Raises ValueError if a ``collate_fn`` made other rows than samples."""
        if targets.items is None:
            raise ValueError(NO_DATASET)
        return np.searchsorted(self.starts, targets.of_targets(targets.items).numpy(), side="right") - 1


def _weighted(sample: Any, weight: float) -> Any:
    if weight == 1 or not isinstance(sample, Mapping):
        return sample
    if "sequences" in sample:
        return {**sample, "sequences": [_weighted(sequence, weight) for sequence in sample["sequences"]]}
    given = sample.get("weights", np.ones(len(sample.get("labels", ()))))
    return {**sample, "weights": weight * np.asarray(given)}


class Shares:
    """Numbers of samples of each dataset in update steps of ``size`` samples, by ``weights``."""

    def __init__(self, weights: Sequence[Fraction], size: int) -> None:
        self._size = size
        self.quotas = [weight / sum(weights) * size for weight in weights]
        """Exact share of each dataset in an update step [samples]."""
        # In units of the common denominator, all numbers are integers.
        self._unit = lcm(*(quota.denominator for quota in self.quotas))
        self._floors = [int(quota) for quota in self.quotas]
        self._rests = [int(quota % 1 * self._unit) for quota in self.quotas]
        self._states = [([0] * len(weights), [0] * len(weights))]

    def before_and_in(self, step: int) -> tuple[list[int], list[int]]:
        """Returns the samples of each dataset before an update step, and in it."""
        nearest = min(step // _STEPS_PER_STATE, len(self._states) - 1)
        before, owed = self._states[nearest]
        for earlier in range(nearest * _STEPS_PER_STATE, step):
            counts, owed = self._counts(owed)
            before = [a + b for a, b in zip(before, counts, strict=True)]
            if earlier + 1 == len(self._states) * _STEPS_PER_STATE:
                self._states.append((before, owed))
        return before, self._counts(owed)[0]

    def _counts(self, owed: Sequence[int]) -> tuple[list[int], list[int]]:
        counts = list(self._floors)
        owed = [debt + rest for debt, rest in zip(owed, self._rests, strict=True)]
        by_debt = sorted((-debt, i) for i, debt in enumerate(owed) if self._rests[i])
        for _, i in by_debt[: self._size - sum(counts)]:
            counts[i] += 1
            owed[i] -= self._unit
        return counts, owed


class MixtureOrder(Order):
    """Order of the samples of a mixture with weights, over all epochs of a training.

    Each dataset is passed through without repetition, in a new order each time, also across epochs. An epoch is whole
    update steps; ``samples_per_epoch`` None is as many samples as the datasets have. ``shuffle`` shuffles each pass, and
    each update step.
    """

    def __init__(
        self,
        mixture: Mixture,
        global_batch_size: int,
        samples_per_epoch: int | None = None,
        max_steps_per_epoch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.mixture, self._size, self._shuffle, self._seed = mixture, global_batch_size, shuffle, seed
        self.samples_per_epoch = samples_per_epoch or len(mixture)
        self._num_steps = self.samples_per_epoch // global_batch_size
        self._is_cut = max_steps_per_epoch is not None
        if max_steps_per_epoch is not None:
            self._num_steps = min(self._num_steps, max_steps_per_epoch)
        self.shares = Shares(mixture.weights or (), global_batch_size)
        # For each dataset, the pass that ends and the one that starts.
        self._pass = lru_cache(maxsize=2 * len(mixture.lengths))(self._make_pass)

    def num_steps(self, epoch: int) -> int:
        """Returns the number of update steps, the same in each epoch."""
        return self._num_steps

    def end(self, epoch: int, step: int) -> int:
        """Returns the samples of whole update steps."""
        return (step + 1) * self._size

    def _make_pass(self, which: int, number: int) -> Any:
        seed, length = seed_of(self._seed, 1, which, number), self.mixture.lengths[which]
        # Bounded for all datasets together, of which each keeps two orders.
        is_lazy = sum(self.mixture.lengths) > NUM_IN_MEMORY
        return epoch_permutation(length, 0, self._shuffle, seed, is_lazy)

    def samples(self, epoch: int, step: int) -> np.ndarray:
        """Returns the dataset indices of an update step."""
        step += epoch * self._num_steps
        pieces = []
        for which, (drawn, number) in enumerate(zip(*self.shares.before_and_in(step), strict=True)):
            while number > 0:
                num_passes, at = divmod(drawn, self.mixture.lengths[which])
                piece = np.asarray(self._pass(which, num_passes)[at : at + number])
                pieces.append(piece + self.mixture.starts[which])
                drawn, number = drawn + len(piece), number - len(piece)
        indices: np.ndarray = np.concatenate(pieces)
        if not self._shuffle:
            return indices
        generator = torch.Generator().manual_seed(seed_of(self._seed, 0, step))
        return indices[torch.randperm(len(indices), generator=generator).numpy()]

    def problems(self, key: str) -> Iterator[Problem]:
        """Yields empty datasets, and an epoch without update step."""
        if not self._num_steps:
            text = f"an update step has {self._size} samples; set it to as many or more"
            yield Problem("mixture.samples_per_epoch", text, self.samples_per_epoch)
        for name, length in zip(self.mixture.names, self.mixture.lengths, strict=True):
            if length == 0:
                yield Problem(f"{key}.{name}", "it has 0 samples; take the dataset out")

    def log_lines(self, num_epochs: int) -> Iterator[str]:
        """Yields samples, share and passes of each dataset, and shares below a sample."""
        names, drawn = self.mixture.names, self.shares.before_and_in(num_epochs * self._num_steps)[0]
        width = max(map(len, ("dataset", *names)))
        yield f"{'dataset':{width}}     samples   share  passes per epoch  passes in all"
        for name, length, number in zip(names, self.mixture.lengths, drawn, strict=True):
            passes = f"{number / length / num_epochs:16.2f}  {number / length:13.2f}"
            yield f"{name:{width}}  {length:10,}  {number / sum(drawn):6.1%}  {passes}"
        for name, quota in zip(names, self.shares.quotas, strict=True):
            if quota < 1:
                yield f"{name}: {float(quota):.2g} samples per update step, in one of {float(1 / quota):.3g}"
        if (num_left_over := self.samples_per_epoch % self._size) and not self._is_cut:
            yield (
                f"dataset: an epoch of the mixture is {self._num_steps} whole update steps; {num_left_over} of "
                f"{self.samples_per_epoch} samples are left for the next one"
            )

    def fingerprint(self) -> dict[str, Any]:
        """Returns values that must be equal for update steps to contain the same samples."""
        mixture = self.mixture
        weights = [{"0": float(weight)} for weight in mixture.weights or ()]
        return {
            "lengths": list(map(list, zip(mixture.names, mixture.lengths, strict=True))),
            "steps_per_epoch": self._num_steps,
            "weights": dict(zip(mixture.names, weights, strict=True)),
        }


def entries_of(datasets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns each dataset's ``weight``, ``loss_weight`` and ``name``, by default its component's."""
    names = [str(dataset.get("_component_")).rpartition(".")[2] for dataset in datasets]
    return [{"name": n, **split_entry(dataset)[1]} for n, dataset in zip(names, datasets, strict=True)]


# ---- Datasets of a config ------------------------------------------------------------------------


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
