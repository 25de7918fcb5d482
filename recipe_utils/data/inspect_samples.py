"""Reads some samples before training: what a dataset is recognized by on resume, and what to say about it.

A dataset of 1,000 samples: all ranks read samples 0, 500 and 999, whose hash names the dataset in checkpoints, and
rank 0 reads 100 samples, 0, 10, 20, ..., for the log: "dataset: 3 of 100 samples read: no target".
"""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from recipe_utils.parallel.random_state import get_random_state, set_random_state
from recipe_utils.text.mixture import Mixture, MixtureOrder
from recipe_utils.torchtune_names import logger
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.objective import Collator
from recipe_utils.update_steps.order import ShuffledOrder
from recipe_utils.update_steps.samples import CheckedDataset, Prepared, SampleError, SampleReport, UnusedError

_NUM_REMARKED = 100
"""Maximum number of samples that are read for remarks."""
_MOST_IMAGE_BYTES = 4e9
"""Images in memory on a rank, above which a warning says so."""
_MAX_SECONDS = 10.0
"""Time after which no further sample is read for remarks."""
_PLACE = re.compile(r"^\w+ \d+ of [^:]*: ((line|row) \d+ of [^:]*: )?((chosen|rejected): )?(turn \d+ \(\w+\): )?")


def inspect_samples(
    dataset: CheckedDataset, indices: Sequence[int], max_seconds: float | None = None
) -> dict[int, Prepared | SampleError]:
    """Returns samples, or their errors, by index; after ``max_seconds`` no further ones."""
    end_seconds = None if max_seconds is None else time.monotonic() + max_seconds
    read: dict[int, Prepared | SampleError] = {}
    for index in indices:
        if end_seconds is not None and time.monotonic() > end_seconds:
            break
        try:
            read[index] = dataset[index]
        except SampleError as error:
            read[index] = error
    return read


def report_of(
    dataset: CheckedDataset, collator: Collator, source_lengths: Sequence[int], has_remarks: bool
) -> SampleReport:
    """Returns facts about a dataset of at least one sample.

    Args:
        dataset: samples are read from a copy of it.
        collator: collator of its samples.
        source_lengths: lengths of the sources of the dataset that are hashed.
        has_remarks: True to read up to 100 samples, evenly spaced, for remarks, within 10 s.

    Raises:
        SampleError: all hashed samples are bad, and bad samples end the training; or one has what the loss does not take.
        ValueError: no sample has a target.
    """
    dataset, num_samples = dataset.unread(), len(dataset)
    if isinstance(dataset.sources, Mixture):  # a resume may weigh them otherwise
        dataset.sources.loss_weights = (1.0,) * len(dataset.sources.names)
    corners = _corners(source_lengths)
    num_spread = min(num_samples, _NUM_REMARKED) if has_remarks else 0
    spread = sorted({i * num_samples // num_spread for i in range(num_spread)})
    with torch.random.fork_rng(devices=[]):
        read = inspect_samples(dataset, corners)
        others = inspect_samples(dataset, [i for i in spread if i not in read], _MAX_SECONDS)
        # Errors that end the training are raised again when their update step is prepared. Only if there is
        # nothing else to train on, they end it now; one with a cause may be a bug, whose traceback comes then.
        errors = [sample for _, sample in sorted((read | others).items()) if isinstance(sample, SampleError)]
        errors = [error for error in errors if not dataset.skips(error)]
        are_bad = bool(corners) and all(isinstance(read[index], SampleError) for index in corners)
        if are_bad and errors and errors[0].__cause__ is None:
            raise errors[0]
        for error in errors:  # not the sample is wrong, but the loss
            if isinstance(error, UnusedError):
                raise error
        hashes = _hashes_of([read[i] for i in corners], collator)
        read |= others
        example = next((i for i in sorted(read) if _is_trained_on(read[i], collator)), None)
        if example is None:
            example = 0 if errors else _first_trained_on(dataset, collator)
    report = _with_remarks(dataset, collator, {i: read[i] for i in spread if i in read}, bool(errors))
    return report._replace(example=example, hash_of_samples=hashes[0], other_content_hash=hashes[1])


def draws_samples(dataset: CheckedDataset) -> bool:
    """Returns True if the first sample draws from a global generator of Python, NumPy or PyTorch."""
    dataset, before = dataset.unread(), get_random_state()
    for _ in range(2):  # imports and caches of the first call are no draws of a sample
        state = get_random_state()
        inspect_samples(dataset, [0])
    after = get_random_state()
    set_random_state(before)
    return not all(torch.equal(state[name], after[name]) for name in state)


def log_data(loader: UpdateStepLoader, epochs: int, microbatching: str) -> None:
    """Logs a dataset, its update steps, warnings and remarks, on rank 0."""
    dataset, order, report, ranks = loader.dataset, loader.order, loader.dataset.report, loader.ranks
    nouns = f"{dataset.noun}s"
    if not ranks.is_zero:
        return
    for text in loader.budget.collator().remarks():
        logger.warning(text)
    # What a rank gets of an update step, which users of other trainers would compute by hand.
    size, num_ranks = order.end(0, 0), ranks.dp_degree
    *others, least = [len(range(rank, size, num_ranks)) for rank in range(num_ranks)]
    if is_uneven := size % num_ranks > 0:
        listed = f"{', '.join(map(str, others))} and" if len(others) < 8 else f"{others[0]} or"
        logger.info(f"global_batch_size={size}: {num_ranks} ranks take {listed} {least} {nouns}")
    # What was read, so that a wrong file or mask is seen before the first loss.
    text = f"Data: {len(dataset):,} {nouns}"
    if lengths := report.lengths:
        mean, longest = sum(lengths) / len(lengths), max(lengths)
        text += f"; {len(lengths)} of them read: {mean:,.0f} tokens in the mean, {longest:,} at most"
        text += f", {report.num_targets / len(lengths):,.0f} targets" * bool(report.num_targets)
        if report.num_shared:
            fewer = sum(lengths) / (sum(lengths) - report.num_shared)
            text += f", {fewer:.1f} times fewer positions than in a row for each sequence"
    logger.info(text)
    # Images wait as tensors, which are much larger than their files.
    in_memory = report.num_image_bytes / max(len(lengths), 1) * -(-size // num_ranks) * (1 + loader.num_prefetched)
    if in_memory > _MOST_IMAGE_BYTES:
        logger.warning(
            f"images of prefetched update steps take about {in_memory / 1e9:.0f} GB on each rank; set "
            "prefetch_update_steps to a smaller number, or images of tokenizer to smaller ones (max_pixels or size)"
        )
    on_ranks = ""
    if num_ranks > 1:
        on_ranks = f" ({'at most ' * is_uneven}{-(-size // num_ranks)} on each of {num_ranks} data-parallel ranks)"
    per_epoch = order.num_steps(0)
    last = len(order.samples(0, per_epoch - 1))
    logger.info(
        f"Update steps: {epochs * per_epoch} ({epochs} epoch{'s' * (epochs > 1)} of {per_epoch}), "
        f"{size} {nouns} each{f', {last} in the last' * (last != size)}{on_ranks}, {microbatching}"
    )
    # What is skipped or doubtful, the most frequent first.
    for remark, number in Counter(report.remarks).most_common():
        logger.info(f"{dataset.name}: {number} of {report.num_remarked} {nouns} read: {remark}")
    if isinstance(order, MixtureOrder):
        for line in order.log_lines(epochs):
            logger.info(line)
    elif isinstance(order, ShuffledOrder) and order.drop_last and (num_left_over := len(dataset) % size):
        logger.warning(f"last_update_step=drop: {num_left_over} of {len(dataset)} {nouns} are skipped in every epoch")


def _corners(source_lengths: Sequence[int]) -> list[int]:
    """Returns the first, the middle and the last index of each source."""
    corners, end = set[int](), 0
    for length in filter(None, source_lengths):
        start, end = end, end + length
        corners |= {start, start + length // 2, end - 1}
    return sorted(corners)


def _hashes_of(samples: Sequence[Prepared | SampleError], collator: Collator) -> tuple[str, str]:
    """Returns a hash of the integers of samples, and one of all other values that they give to the training."""
    of_integers, of_others = hashlib.sha256(), hashlib.sha256()
    for sample in samples:
        if isinstance(sample, SampleError):
            of_integers.update(str(sample).encode())
            continue
        integers, others = collator.content(sample)
        for column in integers:
            of_integers.update(column.astype(np.int64).tobytes())
        values = {key: others[key] for key in sorted(others)}
        of_others.update(json.dumps(values, skipkeys=True, default=_as_json).encode())
    return of_integers.hexdigest()[:16], of_others.hexdigest()[:16]


def _as_json(value: Any) -> Any:
    """Returns shape and hash of an array, a tensor or an image; the type of another object."""
    array = np.asarray(value.detach().cpu().double() if isinstance(value, torch.Tensor) else value)
    if array.dtype.hasobject:
        return type(value).__name__
    return array.shape, hashlib.sha256(array.tobytes()).hexdigest()


def _counts(sample: Prepared, collator: Collator) -> Mapping[str, float]:
    try:
        return sum((Counter(microbatch.counts) for microbatch in collator.collate([sample])), Counter())
    except Exception:  # raised again when its update step is prepared
        return {collator.counts[0]: 1}


def _is_trained_on(sample: Prepared | SampleError, collator: Collator) -> bool:
    return not isinstance(sample, SampleError) and _counts(sample, collator)[collator.counts[0]] > 0


def _first_trained_on(dataset: CheckedDataset, collator: Collator) -> int:
    """Returns the index of the first sample with a target; 0 if an earlier one will end the training."""
    problem = "it has no target"
    for index in range(len(dataset)):
        (sample,) = inspect_samples(dataset, [index]).values()
        if _is_trained_on(sample, collator):
            return index
        if isinstance(sample, SampleError):
            if not dataset.skips(sample):
                return 0
            problem = str(sample)
    advice = ""
    if collator.counts[0] == "target_tokens":
        advice = "; check its labels, what masks them (train_on_input), and tokenizer.max_seq_len"
    raise ValueError(f"none of its {len(dataset)} samples can be trained on (the last: {problem}){advice}")


def _with_remarks(
    dataset: CheckedDataset, collator: Collator, read: Mapping[int, Prepared | SampleError], stops: bool
) -> SampleReport:
    """Returns what the log says about samples; no remarks if training ``stops`` at one of them."""
    # By name of a dataset, because one without any target takes its share of each update step for nothing.
    remarks, lengths = Counter[str](), list[int]()
    num_read, num_without_targets, totals, num_image_bytes = Counter[str](), Counter[str](), Counter[str](), 0
    for index, sample in read.items():
        if isinstance(sample, SampleError):
            if dataset.skips(sample):
                remarks[f"skipped ({_PLACE.sub('', str(sample))})"] += 1
            continue
        counts = _counts(sample, collator)
        remarks.update(collator.remarks(sample))
        lengths += [int(counts["real_tokens"])] if "real_tokens" in counts else []
        totals.update(counts)
        num_image_bytes += getattr(sample, "num_bytes", 0)
        name = "" if dataset.sources is None else dataset.sources.names[dataset.sources.dataset_of(index)]
        num_read[name] += 1
        num_without_targets[name] += not counts[collator.counts[0]]
    remarks.update(dict(_remarks_on_targets(num_read, num_without_targets, collator.counts[0])))
    return SampleReport(
        remarks={} if stops else remarks,
        num_remarked=len(read),
        lengths=lengths,
        num_targets=int(totals["target_tokens"]),
        num_shared=int(totals["shared_tokens"]),
        num_image_bytes=num_image_bytes,
    )


def _remarks_on_targets(
    num_read: Mapping[str, int], num_without_targets: Mapping[str, int], count: str
) -> Iterator[tuple[str, int]]:
    """Yields remarks on the samples without targets of each named dataset, and their number."""
    for name, number in num_without_targets.items():
        if number == num_read[name] and name:  # half of each update step may be for nothing
            yield f"of {name}, which has no {count.replace('_', ' ')} there", number
        elif number:
            yield f"{f'of {name}, ' if name else ''}no target", number
