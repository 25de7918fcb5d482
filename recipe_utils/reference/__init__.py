"""Log-probabilities of a frozen reference, for losses that compare a policy with it: live, offloaded, or cached on disk."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
