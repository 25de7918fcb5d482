"""Mixtures of datasets whose shares are exact in every update step.

Shares are rounded by largest remainder with carry, in integers. The samples of an update step depend
on its number alone, so they are the same on any layout and after a resume.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import inf, lcm
from typing import Any, Literal

import numpy as np
import torch
from torchtune.datasets import ConcatDataset

from recipe_utils.data.loader.sampler import Cuts, epoch_permutation
from recipe_utils.data.order import NUM_IN_MEMORY, seed_of
from recipe_utils.settings.components import split_entry
from recipe_utils.settings.problems import Problem

_STEPS_PER_STATE = 64
"""Update steps between stored states, from which those between are computed."""


@dataclass(frozen=True)
class MixtureSettings:
    """Arguments of the config key ``mixture``."""

    weigh: Literal["samples", "tokens"] = "samples"
    temperature: float | None = None
    samples_per_epoch: int | None = None


class Mixture(ConcatDataset):
    """Datasets one after the other, with their ``entries`` of the config, see :func:`entries_of`.

    With a ``temperature``, weights are lengths to the power of 1 / temperature.
    """

    def __init__(
        self, datasets: Sequence[Any], entries: Sequence[Any], temperature: float | None = None
    ) -> None:
        super().__init__(list(datasets))
        self.parts, self.lengths = tuple(datasets), tuple(map(len, datasets))
        self.starts: tuple[int, ...] = tuple(np.cumsum([0, *self.lengths[:-1]]).tolist())
        self.names: tuple[str, ...] = tuple(str(entry["name"]) for entry in entries)
        self.loss_weights = tuple(float(entry.get("loss_weight", 1.0)) for entry in entries)
        self.max_epochs = tuple(entry.get("max_epochs", inf) for entry in entries)
        weights: list[Any] = [entry.get("weight") for entry in entries]
        if temperature is not None:
            try:
                weights = [f"{length ** (1 / temperature):.6g}" for length in self.lengths]
            except OverflowError:
                text = "only the largest dataset would be taken; set it to 0.1 or more, or weights"
                raise ValueError(f"mixture.temperature={temperature}: {text}") from None
        self.weigh: Callable[[Sequence[int]], torch.Tensor] | None = None
        """Maps target tokens of an update step by dataset, over all ranks, to the factors of the loss
        of a target by dataset. None: the loss is not summed by dataset."""
        self.schedules: list[dict[int, Fraction]] | None = None
        """Weight of each dataset by update step; None if the datasets are concatenated."""
        if None not in weights:
            by_step = [sorted(w.items()) if isinstance(w, Mapping) else [(0, w)] for w in weights]
            self.schedules = [{step: Fraction(str(w)) for step, w in each} for each in by_step]

    def dataset_of(self, index: int) -> int:
        """Returns the position in the list of the dataset that a sample is from."""
        return bisect_right(self.starts, index) - 1


def mixture_of(dataset: Any) -> Mixture | None:
    """Returns the mixture that a dataset is, or whose samples it transforms."""
    found = getattr(dataset, "dataset", dataset)
    return found if isinstance(found, Mixture) else None


class Shares:
    """Numbers of samples of each dataset in update steps of ``size`` samples.

    ``schedules`` are weights by update step, ``size`` may be one, too. Raises ValueError if all are 0 in some update step.
    """

    def __init__(
        self, schedules: Sequence[Mapping[int, Fraction]], size: int | Mapping[int, int]
    ) -> None:
        sizes = {0: size} if isinstance(size, int) else size
        self._starts = sorted({*sizes}.union(*schedules))
        self._sizes = [sizes[max(step for step in sizes if step <= s)] for s in self._starts]
        self.quotas: list[list[Fraction]] = []
        """Exact shares, for each time between two changes of weights."""
        for start, of_step in zip(self._starts, self._sizes, strict=True):
            weights = [each[max(step for step in each if step <= start)] for each in schedules]
            if not any(weights):
                raise ValueError(f"all weights are 0 from update step {start} on")
            self.quotas.append([weight / sum(weights) * of_step for weight in weights])
        # In units of the common denominator, all numbers are integers.
        self._unit = lcm(*(quota.denominator for quotas in self.quotas for quota in quotas))
        self._rests = [[int(each % 1 * self._unit) for each in quotas] for quotas in self.quotas]
        self._floors = [[int(quota) for quota in quotas] for quotas in self.quotas]
        self._states = [([0] * len(schedules), [0] * len(schedules))]

    def of(self, step: int) -> tuple[list[int], list[int]]:
        """Returns the samples of each dataset before an update step, and in it."""
        nearest = min(step // _STEPS_PER_STATE, len(self._states) - 1)
        before, owed = self._states[nearest]
        for each in range(nearest * _STEPS_PER_STATE, step):
            counts, owed = self._counts(each, owed)
            before = [a + b for a, b in zip(before, counts, strict=True)]
            if each + 1 == len(self._states) * _STEPS_PER_STATE:
                self._states.append((before, owed))
        return before, self._counts(step, owed)[0]

    def _counts(self, step: int, owed: Sequence[int]) -> tuple[list[int], list[int]]:
        which = bisect_right(self._starts, step) - 1
        counts, rests = list(self._floors[which]), self._rests[which]
        owed = [debt + rest for debt, rest in zip(owed, rests, strict=True)]
        by_debt = sorted((-debt, i) for i, debt in enumerate(owed) if rests[i])
        for _, i in by_debt[: self._sizes[which] - sum(counts)]:
            counts[i] += 1
            owed[i] -= self._unit
        return counts, owed


class MixtureOrder:
    """Order of a mixture's samples over all epochs of a training, in update steps.

    Each dataset is passed through without repetition, in a new order each time, also across epochs.
    ``settings`` are DataSettings; ``sizes`` map an update step of the training to the samples per update
    step from there on. Weights are divided by ``means``, by name, if given.
    """

    def __init__(
        self,
        mixture: Mixture,
        settings: Any,
        sizes: int | Mapping[int, int],
        num_epochs: int,
        means: Mapping[str, float] | None = None,
    ) -> None:
        self.mixture, self.num_epochs = mixture, num_epochs
        self._shuffle, self._seed, self._means = settings.shuffle, settings.data_seed, means
        self.samples_per_epoch: int = settings.of_mixture.samples_per_epoch or len(mixture)
        self._sizes = {0: sizes} if isinstance(sizes, int) else sizes
        length = self.samples_per_epoch, "drop", settings.max_steps_per_epoch
        self.cuts = Cuts(self._sizes, *length)
        self.steps_per_epoch = self.cuts.num_steps(0)
        schedules = []
        for name, schedule in zip(mixture.names, mixture.schedules or (), strict=True):
            mean = Fraction(str(means[name])) if means is not None else 1
            schedules.append({step: weight / mean for step, weight in schedule.items()})
        self.shares = Shares(schedules, self._sizes)
        self.drawn = self.shares.of(self.cuts.first_step(num_epochs))[0]
        """Samples that the training takes of each dataset."""
        # For each dataset, the pass that ends and the one that starts.
        self._pass = lru_cache(maxsize=2 * len(schedules))(self._make_pass)

    def _make_pass(self, which: int, number: int) -> Any:
        seed, length = seed_of(self._seed, 1, which, number), self.mixture.lengths[which]
        # Bounded for all datasets together, of which each keeps two orders.
        is_lazy = sum(self.mixture.lengths) > NUM_IN_MEMORY
        return epoch_permutation(length, 0, self._shuffle, seed, is_lazy)

    def epoch(self, epoch: int) -> Any:
        """Returns the order of an epoch, of which whole update steps can be taken."""
        return _Epoch(self, epoch)

    def step(self, step: int) -> np.ndarray:
        """Returns the dataset indices of an update step, which is counted over all epochs."""
        found = []
        for which, (drawn, number) in enumerate(zip(*self.shares.of(step), strict=True)):
            while number > 0:
                num_passes, at = divmod(drawn, self.mixture.lengths[which])
                part = np.asarray(self._pass(which, num_passes)[at : at + number])
                found.append(part + self.mixture.starts[which])
                drawn, number = drawn + len(part), number - len(part)
        indices: np.ndarray = np.concatenate(found)
        if not self._shuffle:
            return indices
        generator = torch.Generator().manual_seed(seed_of(self._seed, 0, step))
        return indices[torch.randperm(len(indices), generator=generator).numpy()]

    def problems(self, key: str) -> Iterator[Problem]:
        """Yields empty datasets and those passed through too often, or an epoch without update step."""
        size, epochs, steps = self._sizes[0], self.num_epochs, range(self.steps_per_epoch)
        if not steps:
            text = f"an update step has {size} samples; set it to as many or more"
            yield Problem("mixture.samples_per_epoch", text, self.samples_per_epoch)
        for i, (name, length) in enumerate(
            zip(self.mixture.names, self.mixture.lengths, strict=True)
        ):
            most, drawn = self.mixture.max_epochs[i], self.drawn[i]
            allowed = most * length if length else inf
            if length == 0:
                yield Problem(f"{key}.{name}", "it has 0 samples; take the dataset out")
            if drawn > allowed:
                fits = sum(self.shares.of(n * epochs)[0][i] <= allowed for n in steps) - 1
                text = (
                    f"it allows {allowed:g} samples, {epochs} epochs of {len(steps)} update steps take {drawn}; "
                    f"set {f'max_steps_per_epoch to {fits} or ' if fits else ''}a smaller weight"
                )
                yield Problem(f"{key}.{name}.max_epochs", text, most)

    def log_lines(self) -> Iterator[str]:
        """Yields samples, share and passes of each dataset, and shares below a sample."""
        names, total = self.mixture.names, sum(self.drawn)
        width = max(map(len, ("dataset", *names)))
        yield f"{'dataset':{width}}     samples   share  passes per epoch  passes in all"
        for name, length, drawn in zip(names, self.mixture.lengths, self.drawn, strict=True):
            passes = f"{drawn / length / self.num_epochs:16.2f}  {drawn / length:13.2f}"
            yield f"{name:{width}}  {length:10,}  {drawn / total:6.1%}  {passes}"
        for name, quota in zip(names, self.shares.quotas[0], strict=True):
            if 0 < quota < 1:
                yield f"{name}: {float(quota):.2g} samples per update step, in one of {float(1 / quota):.3g}"
        if self._means is not None:
            yield f"mean target tokens: {self._means}"

    def fingerprint(self) -> dict[str, Any]:
        """Returns values that must be equal for update steps to contain the same samples."""
        names, schedules = self.mixture.names, self.mixture.schedules or ()
        weights = [{str(step): float(each[step]) for step in each} for each in schedules]
        of_tokens = {} if self._means is None else {"mean_target_tokens": self._means}
        return {
            "lengths": [list(each) for each in zip(names, self.mixture.lengths, strict=True)],
            "steps_per_epoch": self.steps_per_epoch,
            "weights": dict(zip(names, weights, strict=True)),
            **of_tokens,
        }


@dataclass(frozen=True)
class _Epoch:
    order: MixtureOrder
    epoch: int

    def __getitem__(self, window: slice) -> np.ndarray:
        cuts = self.order.cuts
        return self.order.step(cuts.first_step(self.epoch) + cuts.step_at(self.epoch, window.start))


# ---- Config ---------------------------------------------------------------------------------------


def entries_of(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns each dataset's ``weight``, ``max_epochs``, ``loss_weight`` and ``name``, by default its component's."""
    names = [str(part.get("_component_")).rpartition(".")[2] for part in parts]
    return [{"name": n, **split_entry(part)[1]} for n, part in zip(names, parts, strict=True)]


def problems_with_list(key: str, parts: Any, settings: MixtureSettings | None) -> Iterator[Problem]:
    """Yields problems of the keys of a list of datasets, and of the key ``mixture`` unless it is None."""
    parts = parts if isinstance(parts, list) else []
    entries = entries_of(parts)
    number, temperature = sum("weight" in entry for entry in entries), None
    if settings is not None:
        temperature = settings.temperature
        for name, value in vars(settings).items():
            if name != "weigh" and value is not None and not _is_number(value):
                yield Problem(f"mixture.{name}", "it must be above 0", value)
        if not number and (temperature is None or not entries):
            yield Problem("mixture", f"it has no effect without a list of weights; set {key}")
    if number and temperature is not None:
        yield Problem("mixture.temperature", "weights are given, too; take one out", temperature)
    elif number and key != "dataset":
        yield Problem(key, "validation takes each sample once; take the weights out")
    elif 0 < number < len(entries):
        text = f"{number} of {len(entries)} datasets have a weight; give all of them one, or none"
        yield Problem(key, text)
    is_mixture = temperature is not None or any(split_entry(part)[1] for part in parts)
    for name, number in Counter(str(entry["name"]) for entry in entries).items():
        if number > 1 and is_mixture:
            yield Problem(key, f"{number} of its datasets are called {name}; give each a name")
    for index, entry in enumerate(entries):
        weight, most, name = entry.get("weight", 1), entry.get("max_epochs", 1), entry["name"]
        if not _is_weight(weight):
            text = (
                "it must be a number above 0, or a schedule by update steps from 0 on, such as "
                "{0: 0.6, 1000: 0.3}; or take the dataset out"
            )
            shown = repr(weight) if isinstance(weight, str) else weight
            yield Problem(f"{key}.{index}.weight", text, shown)
        if not _is_number(most):
            yield Problem(f"{key}.{index}.max_epochs", "it must be a number above 0", most)
        if is_mixture and not (isinstance(name, str) and re.fullmatch(r"[^\s/]+", name)):
            text = "metrics are named by it: set it to a word without / and spaces"
            yield Problem(f"{key}.{index}.name", text, repr(name))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < inf


def _is_weight(weight: Any) -> bool:
    if not isinstance(weight, dict):
        return _is_number(weight)
    are_steps = all(type(step) is int and step >= 0 for step in weight) and 0 in weight
    values = [value for value in weight.values() if value != 0]  # 0 pauses a dataset
    return are_steps and bool(values) and all(map(_is_number, values))


def changed_weights(
    saved: Mapping[str, Any], current: Mapping[str, Any], epoch: int, samples_consumed: int
) -> list[str]:
    """Returns a text for each dataset whose weights before a position differ between fingerprints."""
    then, now, texts = saved.get("weights", {}), current.get("weights", {}), []
    for name in then.keys() & now.keys():
        if isinstance(saved["global_batch_size"], dict):
            if then[name] != now[name]:
                text = "weights cannot change in a training whose global_batch_size does"
                texts.append(
                    f"dataset.{name}: {now[name]} now, {then[name]} in the checkpoint: {text}"
                )
            continue
        step = epoch * saved["steps_per_epoch"] + samples_consumed // saved["global_batch_size"]
        before, after = (
            {int(k): weight for k, weight in each[name].items() if int(k) < max(step, 1)}
            for each in (then, now)
        )
        if before != after:
            shown, wanted = before[max(before)], after[max(after)]
            texts.append(
                f"dataset.{name}: weight {shown:g} in the checkpoint, {wanted:g} now; write weight: "
                f"{ {**before, step: wanted} } to change it from update step {step} on"
            )
    return texts
