"""Plans by value of ``microbatching``."""

from recipe_utils.data.plan.packed import plan_packed
from recipe_utils.data.plan.padded import plan_in_order, plan_least_padding

PLANS = {
    "in_order": plan_in_order,
    "least_padding": plan_least_padding,
    "packed": plan_packed,
}
"""Value of ``microbatching`` -> plan."""
