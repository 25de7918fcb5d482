"""Costs of microbatches, by which plans compare."""

from typing import NamedTuple


class MicrobatchCost(NamedTuple):
    """Cost of a microbatch, in positions of a short sample.

    A position costs its share of the matrix products and, in attention, more the longer its row or
    document is. Per token these are 6 * N and 6 * L * d * s floating-point operations for forward
    and backward with a causal mask (N parameters, L layers, width d, length s; Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1), so the second equals the first at s = N / (L * d) if all
    operations are equally fast. Each microbatch has an overhead that does not depend on its size.
    """

    overhead: float = 75.0
    """Cost of one more microbatch. On two CPU cores, a fit to measured times gave 100; the cheapest
    cut is flat around it (75 costs 0.2 % more), and less padding takes less memory."""
    equal_attention_length: float = float("inf")
    """Length at which attention takes as long as everything else [tokens]."""

    def __call__(self, num_rows: int, longest: int) -> float:
        """Returns the cost of ``num_rows`` samples padded to ``longest`` tokens."""
        return num_rows * self.sample_cost(longest) + self.overhead

    def sample_cost(self, length: int) -> float:
        """Returns the part of a sample of ``length`` tokens, padding included, in its microbatch's cost."""
        return length * (1 + length / self.equal_attention_length)


def cost_on(device_type: str, equal_length: float) -> MicrobatchCost:
    """Returns the cost on a device: measured on a CPU, an estimate elsewhere.

    Launching a microbatch's kernels takes some 5 ms, in which a GPU would compute 300 to 500 positions of a
    model of a billion parameters; its attention runs at about half the speed of its matrix products. ``equal_length`` is
    ``equal_attention_length`` if an operation takes the same time everywhere.
    """
    overhead, slowness = (75.0, 3.6) if device_type == "cpu" else (400.0, 2.0)
    return MicrobatchCost(overhead, equal_length / slowness)
