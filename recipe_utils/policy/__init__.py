"""Rollouts: answers of a policy with rewards or advantages, their datasets, losses and rounds."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.policy.losses": "PolicyLoss",
        "recipe_utils.policy.rollouts": "rollout_dataset RolloutDataset",
    }
)
