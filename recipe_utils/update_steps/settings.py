"""Config keys of the data loader."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from recipe_utils.parallel.process_group import local_world_size_from_env
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.plans.microbatching import MicrobatchSettings, PlanName
from recipe_utils.settings.components import MadeWith, component_at
from recipe_utils.settings.keys import STRICT, Count, CountOrZero, OnlyWith
from recipe_utils.settings.problems import ConfigError, Problem


@dataclass(frozen=True, config=STRICT)
class DataSettings(MicrobatchSettings):
    """Samples of an update step and their microbatches."""

    batch_size: Count = 1
    """Samples per microbatch."""
    gradient_accumulation_steps: Count | None = None
    """Microbatches per rank and update step. Default: 1, or what ``global_batch_size`` requires."""
    global_batch_size: Count | None = None
    """Samples per update step over all ranks; replaces ``gradient_accumulation_steps``."""
    batch_size_val: Annotated[Count | None, OnlyWith("run_val_every_n_steps")] = None
    """Samples per microbatch in validation. Default: ``batch_size``."""
    microbatching: PlanName = "in_order"
    """``in_order``: ``batch_size`` samples at a time; ``least_padding``: sorted by length and
    cut for the least cost; ``packed``: concatenated to rows without padding."""
    max_tokens_per_microbatch: Count | Literal["auto"] | None = None
    """Maximum positions per microbatch, not with ``in_order``: tokens of a packed row, or rows
    times the longest row. ``auto`` finds the largest that fits while training (CUDA). Default:
    ``batch_size`` times ``tokenizer.max_seq_len``."""
    max_ranks_per_row: Count = 1
    """Maximum neighboring ranks (2, 4, ...) that compute a sample of more than
    ``max_tokens_per_microbatch`` tokens together, with ``packed``."""
    balance_over_ranks: bool | None = None
    """Moves samples between ranks to balance them. Default: True unless ``in_order``."""
    last_update_step: Literal["train", "drop"] = "train"
    """Samples left at the end of an epoch: ``train`` them in a short update step, or ``drop`` them."""
    max_steps_per_epoch: Count | None = None
    """Maximum update steps per epoch."""
    shuffle: bool = True
    """Shuffles the dataset in each epoch, in the same order on any number of ranks."""
    data_seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the shuffled order, and of what an objective draws for a sample. 0 is the order of torchtune's sampler."""
    order: Annotated[dict[str, Any], MadeWith(num_positional=2)] | None = None
    """An order of one's own, such as a curriculum. Its first arguments are the order of the other keys, which null
    keeps, and the dataset."""
    num_workers: CountOrZero = 0
    """DataLoader worker processes; 0 loads in the background thread."""
    prefetch_update_steps: CountOrZero = 2
    """Update steps that a background thread prepares ahead; 0 prepares each one on demand."""
    on_bad_sample: Literal["raise", "skip"] = "raise"
    """``skip``: bad samples are skipped with a warning; counts stay exact."""
    sample_losses: bool = False
    """Writes the mean loss of each sample to ``logs/sample_losses.npy``."""
    mixture: dict[Literal["samples_per_epoch"], Count] | None = None
    """``samples_per_epoch``: samples drawn in an epoch from a ``dataset`` list with weights. Default: as many as all
    datasets have."""
    collate_fn: str = "torchtune.data.padded_collate_sft"
    """Function that pads the samples of a microbatch; not with ``packed``."""

    def problems(self) -> Iterator[Problem]:
        """Yields contradictions between the keys."""
        plan = f"microbatching={self.microbatching}"

        def unused(key: str, text: str) -> Problem:
            return Problem(key, f"{plan} {text}", getattr(self, key))

        # Samples in order are counted, and stay where the order put them.
        instead = "remove the key, or set microbatching=packed or least_padding"
        if not self.plans_by_tokens and self.max_tokens_per_microbatch is not None:
            yield unused("max_tokens_per_microbatch", f"counts samples, not tokens; {instead}")
        if not self.plans_by_tokens and self.balance_over_ranks:
            yield unused("balance_over_ranks", f"keeps every sample on its rank; {instead}")
        # Functions that pad: a packed row has no padding, and a training pads at the end.
        if self.is_packed and self.collate_fn != DataSettings.collate_fn:
            instead = "remove the key, or set microbatching=least_padding"
            yield unused("collate_fn", f"does not use it; {instead}")
        if "left_pad_sequence" in self.collate_fn:
            yield Problem("collate_fn", "it pads for inference; remove the key", self.collate_fn)
        try:
            component_at(self.collate_fn)
        except ValueError as error:
            yield Problem("collate_fn", str(error), self.collate_fn)

    def problems_of_long_rows(self, ranks: RankSettings) -> Iterator[Problem]:
        """Yields problems of rows that several ranks compute; without any, those of the ranks."""
        most, dims, problems = self.max_ranks_per_row, ranks.dims_or_none, list[str]()
        if most == 1:
            return
        # A long row needs a plan that moves samples, and a number of tokens above which it is long.
        keeps = "keeps every sample on its rank"
        if not self.is_packed:
            problems.append(f"microbatching={self.microbatching} {keeps}; remove the key, or set microbatching=packed")
        elif self.max_tokens_per_microbatch is None:
            text = "set max_tokens_per_microbatch to the tokens that fit on a rank"
            problems.append(f"without max_tokens_per_microbatch no row is too long for one; {text}")
        if self.balance_over_ranks is False:
            problems.append(f"balance_over_ranks=False {keeps}; remove balance_over_ranks")
        # Groups of 2, 4, ... neighbors: a power of two that divides the ranks, all on one node, whose links are fast.
        if most & (most - 1):
            below = 1 << most.bit_length() - 1
            problems.append(f"it is not a power of two; set it to {below} or {2 * below}")
        if dims is not None and not problems:
            num_neighbors = math.gcd(dims.dp_degree, most)
            num_local = math.gcd(local_world_size_from_env() // dims.tp, num_neighbors)
            if num_neighbors < most:
                problems.append(
                    f"{dims.dp_degree} data-parallel ranks cannot be grouped by {most}; set it to {num_neighbors}"
                )
            elif num_local < most:
                problems.append(
                    f"the ranks of a row are on one node, which has {num_local} neighboring data-parallel ranks; set it to "
                    f"{num_local}"
                )
        for text in problems:
            yield Problem("max_ranks_per_row", text, most)

    def samples_per_update_step(self, dp_degree: int) -> int:
        """Returns the samples of an update step over all ranks."""
        per_rank = self.batch_size * self.num_accumulated(dp_degree)
        return self.global_batch_size or per_rank * dp_degree

    def num_accumulated(self, dp_degree: int, must_divide: bool = False) -> int:
        """Returns the microbatches per rank and update step, before samples are regrouped.

        If ranks do not divide ``global_batch_size``, counts those of the largest share, whose last one may
        be smaller.

        Raises:
            ConfigError: ``global_batch_size`` contradicts ``gradient_accumulation_steps``, or it
                ``must_divide`` into whole microbatches and does not.
        """
        steps, total = self.gradient_accumulation_steps, self.global_batch_size
        if total is None:
            return steps or 1
        # 12 samples of 3 ranks with batch_size=2 need 2 passes of 6; of 14, the third has a rest of 2.
        per_pass = self.batch_size * dp_degree
        needed, rest = divmod(total, per_pass)
        if rest and must_divide:
            below = max(needed, 1) * per_pass
            text = (
                f"it is not a multiple of batch_size={self.batch_size} * {dp_degree} data-parallel ranks = "
                f"{per_pass}; the nearest multiples are {below} and {below + per_pass}"
            )
        elif steps is None or steps * per_pass == total:
            return needed + (rest > 0)
        else:
            text = (
                f"batch_size={self.batch_size} * gradient_accumulation_steps={steps} * {dp_degree} data-parallel ranks "
                f"= {per_pass * (steps or 1)}; set only one of the two keys (~gradient_accumulation_steps on the "
                "command line removes that one)"
            )
        raise ConfigError(Problem("global_batch_size", text, total))

    def of_validation(self) -> "DataSettings":
        """Returns settings for all samples in dataset order, ``batch_size_val`` on each rank at a time."""
        return replace(
            self,
            batch_size=self.batch_size_val or self.batch_size,
            gradient_accumulation_steps=None,
            global_batch_size=None,
            last_update_step="train",
            max_steps_per_epoch=None,
            shuffle=False,
            order=None,
            sample_losses=False,
        )


def data_on_ranks(data: DataSettings, ranks: RankSettings, must_divide: bool = False) -> Iterator[Problem]:
    """Yields batch sizes that do not fit the ranks, see :meth:`DataSettings.num_accumulated`."""
    if ranks.dims_or_none is not None:  # else a problem of ``ranks`` alone
        try:
            data.num_accumulated(ranks.dims_or_none.dp_degree, must_divide)
        except ConfigError as error:
            yield from error.problems
