"""Config keys of the data: which samples form an update step, and how they become microbatches."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from recipe_utils.data.loader.plan import MicrobatchCost
from recipe_utils.parallel.ranks import RankSettings
from recipe_utils.settings.components import component_at
from recipe_utils.settings.settings import ROOM, Count, CountOrZero, Positive


@dataclass(frozen=True, config=ROOM)
class DataSettings:
    """Which samples are in an update step, and how they become microbatches."""

    batch_size: Count = 1
    """Samples per microbatch."""
    gradient_accumulation_steps: Count | None = None
    """Microbatches per rank and update step; null is 1, unless ``global_batch_size`` says more."""
    global_batch_size: Count | None = None
    """Samples per update step over all ranks, instead of ``gradient_accumulation_steps``."""
    batch_size_val: Count | None = None
    """Samples per microbatch in validation; null is ``batch_size``."""
    microbatching: Literal["in_order", "least_padding", "packed"] = "in_order"
    """``in_order``: ``batch_size`` samples at a time, as they come; ``least_padding``: sorted by length
    and cut for least cost; ``packed``: side by side in rows without padding. The gradient is the same."""
    max_tokens_per_microbatch: Count | None = None
    """Bound on a microbatch's slots, not with ``in_order``: a row's tokens, or rows times longest row;
    null is ``batch_size`` times ``tokenizer.max_seq_len``."""
    microbatch_overhead_slots: Positive | None = None
    """What one microbatch more costs ``least_padding``, in slots; null is 75, as measured on CPUs, and 400, an
    estimate, elsewhere. ``python -m recipe_utils.benchmark.microbatch_cost`` measures it."""
    balance_over_ranks: bool | None = None
    """Samples move between ranks, so that each computes about as much; null is True unless ``in_order``."""
    last_update_step: Literal["train", "drop"] = "train"
    """``train``: the samples left at an epoch's end are a short update step; ``drop``: they are left out."""
    max_steps_per_epoch: Count | None = None
    """Update steps per epoch at most."""
    shuffle: bool = True
    """A new order in each epoch, the same on any number of ranks."""
    data_seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Of that order, and of images' crops and masks, which do not depend on ``seed``; with 0 the order is torchtune's,
    whose sampler knows no other."""
    num_workers: CountOrZero = 0
    """DataLoader processes; 0 loads in the background thread."""
    prefetch_update_steps: CountOrZero = 2
    """Update steps prepared ahead; 0 prepares each when it is asked for."""
    on_bad_sample: Literal["raise", "skip"] = "raise"
    """``skip``: samples that cannot be read or trained on are left out by name; counts stay exact."""
    collate_fn: str = "torchtune.data.padded_collate_sft"
    """Dotted path of what pads the samples of a microbatch; not with ``packed``."""

    def problems(self) -> Iterator[str]:
        """What is wrong between the keys."""
        if self.microbatching == "in_order" and self.max_tokens_per_microbatch is not None:
            yield (
                f"max_tokens_per_microbatch={self.max_tokens_per_microbatch}: microbatching=in_order "
                "counts samples, not tokens; set microbatching=packed or least_padding"
            )
        if self.microbatching == "in_order" and self.balance_over_ranks:
            yield (
                "balance_over_ranks=True: microbatching=in_order leaves every sample on its rank; set "
                "microbatching=packed or least_padding"
            )
        if self.microbatching == "packed" and self.collate_fn != DataSettings.collate_fn:
            yield (
                f"collate_fn={self.collate_fn}: microbatching=packed makes its rows itself; leave the "
                "key out, or set microbatching=least_padding"
            )
        if "left_pad_sequence" in self.collate_fn:
            yield f"collate_fn={self.collate_fn}: it pads for inference; leave the key out"
        try:
            component_at(self.collate_fn)
        except ValueError as error:
            yield f"collate_fn={self.collate_fn}: {error}"

    def problems_with(self, ranks: RankSettings) -> Iterator[str]:
        """What is wrong with the batch on so many ranks."""
        if ranks.dims_or_none is not None:
            try:
                self.num_accumulated(ranks.dims_or_none.dp_degree)
            except ValueError as error:
                yield str(error)

    def num_accumulated(self, dp_degree: int) -> int:
        """Microbatches per rank and update step, before regrouping.

        Args:
            dp_degree: number of ranks that hold different data.

        Raises:
            ValueError: a global batch that does not divide, or two keys that disagree.
        """
        steps, total = self.gradient_accumulation_steps, self.global_batch_size
        if total is None:
            return steps or 1
        per_pass = self.batch_size * dp_degree
        needed, rest = divmod(total, per_pass)
        if rest:
            raise ValueError(
                f"global_batch_size={total}: it is no multiple of batch_size={self.batch_size} * "
                f"{dp_degree} data-parallel ranks = {per_pass}; the nearest multiples are "
                f"{max(needed, 1) * per_pass} and {(max(needed, 1) + 1) * per_pass}"
            )
        if steps not in (None, needed):
            raise ValueError(
                f"global_batch_size={total}: batch_size={self.batch_size} * "
                f"gradient_accumulation_steps={steps} * {dp_degree} data-parallel ranks = "
                f"{self.batch_size * (steps or 1) * dp_degree}; give one of the two keys "
                "(~gradient_accumulation_steps on the command line takes that one out)"
            )
        return needed

    def cost(self, of_device: MicrobatchCost) -> MicrobatchCost:
        """What a microbatch costs, as the config says or as the device does."""
        if self.microbatch_overhead_slots is None:
            return of_device
        return of_device._replace(overhead_slots=self.microbatch_overhead_slots)

    def warns_of_costs(self, are_estimated: bool) -> Iterator[str]:
        """That a plan rests on costs that nobody has measured."""
        if (
            are_estimated
            and self.microbatching == "least_padding"
            and self.microbatch_overhead_slots is None
        ):
            yield (
                "microbatching=least_padding: what a microbatch costs on this device is an estimate; python -m "
                "recipe_utils.benchmark.microbatch_cost measures it, and microbatch_overhead_slots sets it"
            )

    def of_one_pass(self) -> "DataSettings":
        """All samples in their own order, as many at a time as in an update step."""
        return replace(self, last_update_step="train", max_steps_per_epoch=None, shuffle=False)

    def of_validation(self) -> "DataSettings":
        """All samples in their own order, ``batch_size_val`` on each rank at a time."""
        return replace(
            self.of_one_pass(),
            batch_size=self.batch_size_val or self.batch_size,
            gradient_accumulation_steps=None,
            global_batch_size=None,
        )
