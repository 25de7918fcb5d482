"""Update steps: order, load, plan, exchange, collate, count, queue.

Samples 44, 22, 29 and 18 of 5, 3, 9 and 2 tokens, two ranks, rows of at most 10 tokens:

=========  =====================================================  =============================================
order      samples of the update step, over all ranks             rank 0: samples 44 and 29; rank 1: 22 and 18
load       checked samples of this rank                           rank 0: 5 and 9 tokens; rank 1: 3 and 2
plan       lengths of all ranks -> rows; the same on every rank   rank 0: [5, 3, 2]; rank 1: [9]
exchange   samples move to the rank that computes them            29 goes to rank 1; 22 and 18 go to rank 0
collate    rows -> tensors                                        one row of 10, one of 9, no padding
count      sums over ranks; nobody starts what another lacks      target_tokens 15, 1 microbatch on each
queue      update steps that are prepared ahead of the loop       2 of them
=========  =====================================================  =============================================

15 targets, because the first token of each sample is predicted by nothing: 4 + 2 + 8 + 1.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch.profiler import record_function

from recipe_utils.parallel.ranks import Ranks
from recipe_utils.parallel.to_device import pinned
from recipe_utils.plans.rounds import WHOLE
from recipe_utils.update_steps.collectives import RankCounts, Row, StepCollectives, agreement
from recipe_utils.update_steps.objective import Collator
from recipe_utils.update_steps.order import OnRank, Order, num_done
from recipe_utils.update_steps.prefetch import Prefetched
from recipe_utils.update_steps.samples import CheckedDataset, load_samples
from recipe_utils.update_steps.step import Microbatch, UpdateStep


class RowBudget:
    """Collator of the next planned update step: a fixed one, or one whose tokens a search proposes.

    Args:
        collator: collator of the first update steps, whose budget is the first proposal.
        propose: returns the tokens per microbatch that this rank proposes from now on; all ranks use the least
            proposal of all. None for a fixed collator.
    """

    def __init__(self, collator: Collator, propose: Callable[[], int] | None = None) -> None:
        self._collator, self._propose = collator, propose
        self.tokens = self.proposal()
        """Tokens per microbatch of further update steps, the same on all ranks; 0 if the collator is fixed."""

    def collator(self) -> Collator:
        """Returns the collator of the next planned update step, the same on all ranks."""
        return self._collator

    def proposal(self) -> int:
        """Returns this rank's proposal [tokens]; 0 if the collator is fixed."""
        return 0 if self._propose is None else self._propose()

    def take(self, tokens: int) -> None:
        """Takes the least proposal of all ranks."""
        if tokens not in (0, self.tokens):
            self.tokens, self._collator = tokens, self._collator.with_budget(tokens)


@dataclass(frozen=True)
class UpdateStepLoader:
    """Loader of update steps, which a background thread prepares. All ranks call it together."""

    dataset: CheckedDataset
    order: Order
    budget: RowBudget
    ranks: Ranks
    group: dist.ProcessGroup | None = None
    """CPU group of all ranks; loaders that share it are iterated over one after the other."""
    num_workers: int = 0
    """DataLoader worker processes; 0 loads samples in the background thread."""
    num_prefetched: int = 2
    """Update steps that are prepared ahead; 0 prepares each on demand, in the calling thread."""
    num_to_run: Callable[[int], int] | None = None
    """Maps the most microbatches on a rank to the number, at least as large, that all ranks run; None: as many."""

    def epoch(self, epoch: int, samples_consumed: int = 0) -> Prefetched[UpdateStep]:
        """Returns the update steps of an epoch after its first ``samples_consumed`` samples, to use in a ``with`` block.

        Errors of the dataset or the collator are raised there, and :class:`.OtherRankFailedError` on other ranks.
        """
        closed = threading.Event()  # set when the caller stops early: no wait for other ranks outlasts it
        steps = range(num_done(self.order, epoch, samples_consumed), self.order.num_steps(epoch))
        return Prefetched(self._prepare(epoch, steps, closed), self.num_prefetched, closed)

    def _prepare(self, epoch: int, steps: range, closed: threading.Event) -> Iterator[UpdateStep]:
        """Yields update steps. The queue runs this in its thread."""
        ranks, order, budget, first = self.ranks, self.order, self.budget, self.budget.collator()
        indices = OnRank(order, epoch, steps, ranks.dp_rank, ranks.dp_degree, first.layout.block)
        loaded = load_samples(self.dataset, indices, self.num_workers)
        together = StepCollectives(
            [*first.counts, "skipped_samples"], ranks.is_dp_leader, ranks.dp_peers, self.group, closed
        )
        may_lack_microbatches = ranks.dp_degree > 1 or self.num_to_run is not None
        dummy: Microbatch | None = None
        for number, step in enumerate(steps):
            collator = budget.collator()
            moves = ranks.dp_degree > 1 and collator.layout.moves_samples
            max_samples = indices.most_on_a_rank(number) if moves else None
            # An error in this block reaches all ranks: none starts an update step that another one lacks.
            with agreement(together, collator.length, collator.layout.plan, max_samples) as agree:
                with record_function("load"):
                    samples = next(loaded)
                # A rank with fewer microbatches runs dummy ones, so that FSDP's collectives match. They are made
                # before the ranks agree to start, because nothing may fail after that.
                if dummy is None and may_lack_microbatches:
                    dummy = collator.dummy(samples[0] if samples else self.dataset.example())
                # Every rank computes the plan of all, from their lengths, and keeps its own rows.
                rows = agree.exchange(samples)
                with record_function("collate"):
                    made = [microbatch for row in rows for microbatch in _collate(collator, row, dummy)]
                counts = {name: sum(m.counts.get(name, 0) for m in made) for name in first.counts}
                counts["skipped_samples"] = len(indices[number]) - len(samples)
                agreed = agree.count(RankCounts(counts, len(made), budget.proposal()))
            # From here on all ranks do the same.
            budget.take(agreed.max_tokens)
            if dummy is not None:
                made += [dummy] * ((self.num_to_run or int)(agreed.max_microbatches) - len(made))
            if ranks.device.type == "cuda":  # else copies to the device block the host
                made = pinned(made)
            place = order.end(epoch, step), step + 1 == order.num_steps(epoch)
            yield UpdateStep(step, tuple(made), agreed.totals, ranks.dp_degree, *place)


def _collate(collator: Collator, row: Row, dummy: Microbatch | None) -> list[Microbatch]:
    """Returns a planned row's microbatches. A collator whose rows are never shared need not take a share."""
    if row.samples:
        return collator.collate(row.samples) if row.share == WHOLE else collator.collate(*row)
    assert dummy is not None  # a plan over several ranks has no samples here
    return [dummy]
