"""Prints what a recipe trains on, without building its model.

    python -m recipe_utils.show_data full_finetune_update_step --config my.yaml
    python -m recipe_utils.show_data full_dpo_update_step --config my.yaml --num_samples 9 dataset.split=test

The printed samples are the first of the training, with targets in green, or in brackets if the output
is no terminal. Lengths are those of up to 1,000 samples, evenly spaced.
"""

import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from recipe_utils.check_gradient.recipe_file import parser_of
from recipe_utils.cli.registry import config_path
from recipe_utils.data.collators import text_collator
from recipe_utils.data.dataset_weights import problems_with_list
from recipe_utils.data.loaders import build_order, build_own_order
from recipe_utils.preference.pairs import SIDES, PairSettings, check_is_pair, pair_collator
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.keys import groups_of, keys_of
from recipe_utils.settings.problems import ConfigError, build
from recipe_utils.settings.read import check_keys, read_settings
from recipe_utils.text.documents import chains
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.text.limits import NO_LIMITS
from recipe_utils.text.mixture import MixtureOrder, load_dataset
from recipe_utils.text.samples import TextSample
from recipe_utils.text.trees import sequences_of
from recipe_utils.torchtune_names import instantiate
from recipe_utils.training.command import entry_point
from recipe_utils.update_steps.samples import CheckedDataset, SampleError, facts_of, unread
from recipe_utils.update_steps.settings import DataSettings

_KEYS = {
    "batch_size", "data_seed", "global_batch_size", "max_steps_per_epoch", "on_bad_sample", "shuffle",
}  # fmt: skip
_NUM_READ = 1000


def report(recipe: str, cfg: DictConfig, num_samples: int) -> Iterator[str]:
    """Yields lines about the samples of ``dataset``. Raises ConfigError."""
    # Keys of a training that samples do not depend on are checked, but not needed.
    recipe_settings = build("recipe", settings_of, recipe)
    if "tokenizer" not in keys_of(recipe_settings):
        raise ConfigError(f"recipe={recipe}: its samples are images; set one of texts or pairs")
    cfg.setdefault("microbatching", "packed")  # else the model is built, which chooses it
    values, problems = check_keys(cfg, recipe_settings)
    given = {key: values[key] for key in values.keys() & _KEYS}
    if not given.get("global_batch_size"):  # which another number of ranks may contradict
        given["gradient_accumulation_steps"] = values.get("gradient_accumulation_steps")
    are_pairs = PairSettings in groups_of(recipe_settings).values()
    settings = replace(
        read_settings(OmegaConf.create(given), DataSettings), mixture=values.get("mixture"), order=values.get("order")
    )
    problems += problems_with_list("dataset", values.get("dataset"))
    if problems:
        raise ConfigError(*problems)
    # As in the recipe, but for a model without limits.
    tokenizer: Any = build("tokenizer", instantiate, cfg.tokenizer)
    check = check_is_pair if are_pairs else None
    dataset = build("dataset", load_dataset, cfg.dataset, tokenizer, check)
    ignore_index = values["loss"].get("ignore_index", -100)
    has_trees = facts_of(dataset).has_sequences
    settings = replace(settings, microbatching="packed") if has_trees else settings
    if are_pairs:
        collator = pair_collator(settings, tokenizer, NO_LIMITS)
    else:
        collator = text_collator(settings, tokenizer, ignore_index, has_trees=has_trees)
        collator = replace(collator, reader=replace(collator.reader, drops_columns=True))
    prepare = partial(_without_pixels, collator.prepare)
    checked = CheckedDataset(dataset, "dataset", prepare, settings.on_bad_sample == "skip", collator.noun)
    num_good = yield from _statistics(checked, collator)
    # The order that training has on any number of ranks.
    order = build_order(checked, settings, dp_degree=1)
    if isinstance(order, MixtureOrder):
        yield from order.log_lines(cfg.get("epochs", 1))
    order = build("order", build_own_order, settings.order, order, unread(dataset))
    first_samples = chain.from_iterable(order.samples(0, step) for step in range(order.num_steps(0)))
    for index in map(int, build("num_samples", islice, first_samples, num_samples)):
        try:
            sample = checked[index]
        except SampleError as error:
            yield f"\n{error}"
            continue
        rows = collator.collate([sample])
        is_tree = bool(sample.num_shared) and not are_pairs
        branches = [(row, branch) for row in rows if is_tree for branch in chains(row.inputs["document_lengths"][0])]
        for number, (row, branch) in enumerate(branches):
            places = [place for start_and_stop in branch.ranges for place in range(*start_and_stop)]
            tokens, labels = row.inputs["tokens"][0, places], row.targets.labels[0, places]
            are_targets = [False, *(labels[:-1] == tokens[1:]).tolist()]
            yield f"\n{checked.name_of(index)}, branch {number}: {len(places)} tokens, {sum(are_targets)} targets"
            yield _marked(tokenizer, tokens.tolist(), are_targets, sample.images)
        if is_tree:
            continue
        whole = [("", {"tokens": sample.tokens, "labels": np.append(ignore_index, sample.labels[:-1])})]
        for side, each in zip(SIDES, sequences_of(sample, ignore_index), strict=True) if are_pairs else whole:
            are_targets = each["labels"] != ignore_index
            name = checked.name_of(index) + (side and f", {side}")
            yield f"\n{name}: {len(are_targets)} tokens, {are_targets.sum()} targets"
            yield _marked(tokenizer, each["tokens"].tolist(), are_targets.tolist(), sample.images)
    if not num_good:
        raise SampleError(f"dataset: none of the {collator.noun}s that were read can be trained on")


def _without_pixels(prepare: Callable[..., TextSample], *args: Any) -> TextSample:
    """Returns a prepared sample without the tensors of its images, which a model alone can join."""
    sample = prepare(*args)
    if sample.images is None:
        return sample
    pixels = [each._replace(tensors={}) for each in sample.images.pixels]
    return sample._replace(images=sample.images._replace(pixels=pixels))


def _statistics(checked: CheckedDataset, collator: Any) -> Generator[str, None, int]:
    """Yields a histogram of lengths, and the numbers of doubtful, skipped and bad samples; returns that of good ones."""
    num_read, lengths = min(len(checked), _NUM_READ), list[int]()
    remarks, first, totals = Counter[str](), dict[str, str](), Counter[str]()
    for index in (i * len(checked) // num_read for i in range(num_read)):
        source = checked.name_of(index).rpartition(" ")[2]
        try:
            sample = checked[index]
        except SampleError as error:
            kind = "skipped" if checked.skips(error) else "bad, which ends the training"
            remarks[f"{kind}; the first: {first.setdefault(source + kind, str(error))}"] += 1
            continue
        counts = Counter[str]()
        for microbatch in collator.collate([sample]):
            counts.update(microbatch.counts)
        totals.update(counts)
        lengths.append(collator.length(sample))
        texts = [*collator.remarks(sample), *["no target"] * (not counts["target_tokens"])]
        remarks.update(f"{text} ({source})" for text in texts)
    yield f"dataset: {len(checked):,} {collator.noun}s, {num_read:,} of them read"
    # A bar for each power of two, the longest of 40 characters.
    bins = Counter(length.bit_length() for length in lengths)
    for bits in range(min(bins, default=1), max(bins, default=0) + 1):
        bar = "#" * -(-40 * bins[bits] // max(bins.values()))
        yield f"{1 << bits - 1:9,} to {(1 << bits) - 1:7,} tokens {bins[bits]:6,} {bar}"
    if lengths:
        share, mean = totals["target_tokens"] / totals["real_tokens"], sum(lengths) / len(lengths)
        yield f"mean {mean:.1f} tokens, longest {max(lengths):,}; {share:.1%} of all are targets"
    for remark, number in remarks.most_common():
        yield f"{number} of {num_read:,} {collator.noun}s read: {remark}"
    return len(lengths)


def _marked(tokenizer: Any, tokens: list[int], are_targets: list[bool], images: ImageInputs | None) -> str:
    """Returns the text of tokens, with marks around targets, and images as ``[image 1: 1024x768, 1036 tokens]``."""
    if images is not None:
        are_images = [token < 0 or token in tokenizer.images.token_ids for token in tokens]
        sizes = [size for each in images.pixels for size in each.sizes]
        runs = [(is_run, [*group]) for is_run, group in groupby(range(len(tokens)), are_images.__getitem__)]
        is_each = sum(is_run for is_run, _ in runs) == len(sizes)  # a processor may cut an image into tiles
        text, number = "", 0
        for is_run, places in runs:
            first, stop = places[0], places[-1] + 1
            if is_run:
                number += 1
                width, height = sizes[number - 1] if is_each else (0, 0)
                size = f"{width}x{height}, " if is_each else ""
                text += f"[image {number}: {size}{stop - first} tokens]"
            else:
                text += _marked(tokenizer, tokens[first:stop], are_targets[first:stop], None)
        return text
    begin, end_mark = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("⟦", "⟧")
    takes = signature(tokenizer.decode).parameters
    options = dict.fromkeys({"skip_special_tokens", "truncate_at_eos"} & takes.keys(), False)
    text, marked, end = "", "", 0
    for is_target, group in groupby(are_targets):
        end += len([*group])
        longer = tokenizer.decode(tokens[:end], **options)  # some strip the first space of a text
        marked += f"{begin}{longer[len(text) :]}{end_mark}" if is_target else longer[len(text) :]
        text = longer
    return marked


def main() -> None:
    """Prints the report of the command line; exits with 2 for a wrong config, with 1 if no sample can be trained on."""
    parser = parser_of("python -m recipe_utils.show_data", __doc__)
    parser.add_argument("--num_samples", type=int, default=3, help="samples to print (default 3)")
    given, overrides = parser.parse_known_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| less`

    def show(cfg: DictConfig) -> None:
        for line in report(given.recipe, cfg, given.num_samples):
            print(line)  # noqa: T201

    # The config is that of `tune run` with the same arguments.
    sys.argv = [given.recipe, "--config", str(config_path(given.config)), *overrides]
    entry_point(show)()


if __name__ == "__main__":
    main()
