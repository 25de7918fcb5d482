"""Costs of microbatches, by which plans compare."""

from typing import NamedTuple


class MicrobatchCost(NamedTuple):
    """Cost of a microbatch, in positions of a short sample.

    A position costs its share of the matrix products and, in attention, more the longer its row or
    document is. Per token these are 6 * N and 6 * L * d * s floating-point operations for forward
    and backward with a causal mask (N parameters, L layers, width d, length s; Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1), so the second equals the first at s = N / (L * d) if all
    operations are equally fast. Each microbatch has an overhead that does not depend on its size.
    :mod:`recipe_utils.benchmark.microbatch_cost` fits both to measured times, on two CPU cores to
    within 4 % in the median.
    """

    overhead_slots: float = 75.0
    """Cost of one more microbatch. The fit is 100; the cheapest cut is flat around it (75 costs
    0.2 % more), and less padding takes less memory."""
    equal_attention_length: float = float("inf")
    """Length at which attention would take as long as everything else, were its operations as fast
    as those of matrix products [tokens]."""
    attention_slowness: float = 1.0
    """Time of an operation in attention over the time of one in a matrix product."""

    def __call__(self, num_rows: int, longest: int) -> float:
        """Returns the cost of ``num_rows`` samples padded to ``longest`` tokens."""
        return num_rows * self.of_sample(longest) + self.overhead_slots

    def of_sample(self, length: int) -> float:
        """Returns the part of a sample of ``length`` tokens, padding included, in its microbatch's cost."""
        return length * (1 + length / (self.equal_attention_length / self.attention_slowness))


MEASURED_COSTS = {"cpu": MicrobatchCost(attention_slowness=3.6)}
"""Costs by device type that :mod:`recipe_utils.benchmark.microbatch_cost` measured."""
ESTIMATED_COSTS = MicrobatchCost(400.0, attention_slowness=2.0)
"""Estimate for other devices: launching a microbatch's kernels takes some 5 ms, in which a GPU
would compute 300 to 500 positions of a model of a billion parameters; its attention runs at about
half the speed of its matrix products."""
