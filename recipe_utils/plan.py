"""Plans: how the samples of an update step are grouped into microbatches.

A plan is a pure, deterministic function of lengths and limits; it sees no tensor and no process
group. The loss is normalised over the whole update step, so no plan changes the gradient, only
what it costs to compute.
"""

from collections.abc import Sequence


def plan_in_order(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Groups the samples as they come, ``batch_size`` at a time, as the stock recipes do.

    Args:
        lengths: tokens of each sample of this rank in the update step, shape [n].
        batch_size: samples per microbatch.

    Returns:
        Microbatches of positions in ``lengths``, each position exactly once; the last microbatch may
        be smaller. No samples give no microbatches.
    """
    positions = list(range(len(lengths)))
    return [positions[start : start + batch_size] for start in range(0, len(positions), batch_size)]


PLANS = {"in_order": plan_in_order}
"""Value of ``microbatching`` -> plan."""
