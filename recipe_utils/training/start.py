"""Checks and logs a dataset before training."""

import hashlib
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torchtune.utils import get_logger

from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.mixture import MixtureOrder
from recipe_utils.update_steps.objective import Collator
from recipe_utils.update_steps.samples import CheckedDataset, SampleError

if TYPE_CHECKING:
    from recipe_utils.update_steps.loader import UpdateStepLoader

_log = get_logger("INFO")

_NUM_REMARKED = 100
"""Maximum number of samples that are read for remarks."""
_PLACE = re.compile(r"^sample \d+ of [^:]*: ((line|row) \d+ of [^:]*: )?((chosen|rejected): )?(turn \d+ \(\w+\): )?")
_MAX_SECONDS = 10.0
"""Time after which no further sample is read for remarks."""


class Probe(NamedTuple):
    """Facts about a dataset, read from some of its samples."""

    example: int
    """Index of a good sample; 0 if none was found."""
    hash_of_samples: str
    """Hash of the first, the middle and the last sample of each part of the dataset."""
    remarks: Mapping[str, int]
    """Why samples are skipped or doubtful, and how many of ``num_remarked`` are; empty if training
    will stop at one of them."""
    num_remarked: int
    lengths: Sequence[int] = ()
    """Tokens of each good one that was read for remarks."""
    num_targets: int = 0
    """Target tokens of all of them."""
    num_shared: int = 0
    """Tokens of all of them that are not computed again."""


def probe(dataset: CheckedDataset, collator: Collator, lengths: Sequence[int], has_remarks: bool) -> Probe:
    """Reads some samples once, and further ones until one can be trained on.

    Args:
        dataset: at least one sample.
        collator: collator of its samples.
        lengths: lengths of the parts of the dataset that are hashed, see :class:`Probe`.
        has_remarks: True to read up to 100 samples, evenly spaced, for remarks, within 10 s.

    Raises:
        SampleError: all hashed samples are bad, and bad samples end the training.
        ValueError: no sample has a target.
    """
    num_samples = len(dataset)
    hashed, end = set(), 0
    for length in filter(None, lengths):
        start, end = end, end + length
        hashed |= {start, start + length // 2, end - 1}
    num_remarked, mixture = min(num_samples, _NUM_REMARKED) if has_remarks else 0, dataset.mixture
    remarked = {i * num_samples // num_remarked for i in range(num_remarked)}
    planned = sorted(hashed | remarked)

    digest, remarks, example = hashlib.sha256(), Counter[str](), 0
    has_targets, stops, problem = False, False, "it has no target"
    num_good_of_hashed, first_error = 0, None
    num_shared = 0
    lengths, num_targets, end_seconds = [], 0, time.monotonic() + _MAX_SECONDS
    num_read, without_targets = Counter[str](), Counter[str]()
    with torch.random.fork_rng(devices=[]):
        for number, index in enumerate(chain(planned, range(num_samples))):
            is_planned = number < len(planned)
            if not is_planned and (has_targets or stops):
                break
            if is_planned and index not in hashed and time.monotonic() > end_seconds:
                remarked.discard(index)
                continue
            try:
                sample = dataset[index]
            except SampleError as error:
                problem = str(error)
                if is_planned and index in hashed:
                    digest.update(problem.encode())
                if not dataset.skips(error):
                    stops = True  # raised again when its update step is prepared
                    first_error = first_error or error
                elif is_planned and index in remarked:
                    remarks[f"skipped ({_PLACE.sub('', problem)})"] += 1
                continue
            if is_planned and index in hashed:
                num_good_of_hashed += 1
                for key in collator.fingerprint_keys:
                    digest.update(torch.as_tensor(sample[key], dtype=torch.int64).numpy().tobytes())
            if not is_planned or index in remarked or not has_targets:
                counts = _counts(sample, collator)
                if counts[collator.counts[0]] and not has_targets:
                    has_targets, example = True, index
            if is_planned and index in remarked:
                remarks.update(collator.remarks(sample))
                lengths += [counts["real_tokens"]] if "real_tokens" in counts else []
                num_targets += counts.get("target_tokens", 0)
                num_shared += counts.get("shared_tokens", 0)
                name = "" if mixture is None else mixture.names[mixture.dataset_of(index)]
                num_read[name] += 1
                without_targets[name] += not counts[collator.counts[0]]
    # All ranks read the hashed samples. An error with a cause may be a bug of a dataset, whose
    # traceback is shown when its update step is prepared.
    if first_error and hashed and not num_good_of_hashed and first_error.__cause__ is None:
        raise first_error
    if not has_targets and not stops:
        advice = ""
        if "labels" in collator.fingerprint_keys:
            advice = "; check its labels, what masks them (train_on_input), and tokenizer.max_seq_len"
        raise ValueError(f"none of its {num_samples} samples can be trained on (the last: {problem}){advice}")
    for name, number in without_targets.items():
        if number == num_read[name] and name:  # half of each update step may be for nothing
            remarks[f"of {name}, which has no {collator.counts[0].replace('_', ' ')} there"] = number
        elif number:
            remarks[f"{f'of {name}, ' if name else ''}no target"] = number
    found = {} if stops else remarks, len(remarked), lengths, num_targets, num_shared
    return Probe(example, digest.hexdigest()[:16], *found)


def content_hashes(dataset: Any, name: str) -> dict[str, str]:
    """Returns the ``content_hash`` of each dataset that a dataset consists of by name, where there is one."""
    if isinstance(found := getattr(dataset, "content_hash", None), str):
        return {name: found}  # of all bytes of its file
    # The dataset of a transform, or of torchtune's packed dataset
    parts = [(name, getattr(dataset, key)) for key in ("dataset", "ds") if hasattr(dataset, key)]
    if (several := getattr(dataset, "_datasets", None)) is not None:  # a concatenation or mixture
        names = getattr(dataset, "names", range(len(several)))
        parts = [(f"{name}.{own}", part) for own, part in zip(names, several, strict=True)]
    return {k: v for own, part in parts for k, v in content_hashes(part, own).items()}


def _counts(sample: Any, collator: Collator) -> Mapping[str, int]:
    try:
        counts: Mapping[str, int] = collator.collate([sample]).counts
    except Exception:  # raised again when its update step is prepared
        return {collator.counts[0]: 1}
    return counts


def check_draws(loader: "UpdateStepLoader") -> None:
    """Raises ConfigError if samples are drawn by the global generators that training draws from."""
    settings = loader.settings
    if loader.dataset.find_draws() and settings.prefetch_update_steps and not settings.num_workers:
        text = (
            f"samples of {loader.dataset.name} draw from a global random generator, as training does at the same "
            "time, so no run could be repeated or resumed; set num_workers to 1 or more"
        )
        raise ConfigError(Problem("num_workers", text, 0))


def log_start(loader: "UpdateStepLoader", epochs: int) -> None:
    """Logs a dataset, its update steps, warnings and remarks, on rank 0."""
    if not loader.ranks.is_zero:
        return
    for text in loader.collator.warnings():
        _log.warning(text)
    settings, size, (*others, least) = loader.settings, loader.global_batch_size, loader.shares
    name, is_uneven = loader.dataset.name, least < loader.samples_per_rank
    if is_uneven:
        listed = f"{', '.join(map(str, others))} and" if len(others) < 8 else f"{others[0]} or"
        _log.info(f"global_batch_size={size}: {len(loader.shares)} ranks take {listed} {least} samples")
    found, num_ranks, per_epoch = loader.probe, loader.ranks.dp_degree, loader.steps_per_epoch
    text = f"Data: {len(loader.dataset):,} samples"
    if lengths := found.lengths:
        mean, longest = sum(lengths) / len(lengths), max(lengths)
        text += f"; {len(lengths)} of them read: {mean:,.0f} tokens in the mean, {longest:,} at most"
        text += f", {found.num_targets / len(lengths):,.0f} targets" * bool(found.num_targets)
        if found.num_shared:
            fewer = sum(lengths) / (sum(lengths) - found.num_shared)
            text += f", {fewer:.1f} times fewer positions than in a row for each sequence"
    _log.info(text)
    on_ranks = ""
    if num_ranks > 1:
        on_each = f"{'at most ' * is_uneven}{loader.samples_per_rank} on each"
        on_ranks = f" ({on_each} of {num_ranks} data-parallel ranks)"
    _log.info(
        f"Update steps: {epochs * per_epoch} ({epochs} epoch{'s' * (epochs > 1)} of {per_epoch}), "
        f"{size} samples each{on_ranks}, {settings.microbatching}"
    )
    for remark, number in Counter(loader.probe.remarks).most_common():
        _log.info(f"{name}: {number} of {loader.probe.num_remarked} samples read: {remark}")
    num_left_over = loader.order.samples_per_epoch % size
    if isinstance(loader.order, MixtureOrder):
        for line in loader.order.log_lines(epochs):
            _log.info(line)
        if num_left_over and settings.max_steps_per_epoch is None:
            _log.info(
                f"{name}: an epoch of the mixture is {loader.steps_per_epoch} whole update steps; {num_left_over} of "
                f"{loader.order.samples_per_epoch} samples are left for the next one"
            )
    elif settings.last_update_step == "drop" and num_left_over:
        _log.warning(
            f"last_update_step=drop: {num_left_over} of {len(loader.dataset)} samples are skipped in every epoch"
        )
