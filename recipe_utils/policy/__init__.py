"""Rollouts: answers of a policy with rewards or advantages, their datasets, losses and rounds."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.policy.losses": "PolicyLoss",
        "recipe_utils.policy.objective": "build_policy_loss counts_of GROUPS needs_reference needs_start problems_with_loss "
        "ROLLOUTS take_largest_ratio without_equal_groups",
        "recipe_utils.policy.rollouts": "RolloutDataset",
        "recipe_utils.policy.round_start": "build_reference PolicySettings RoundStart",
        "recipe_utils.policy.rounds": "rollout_dataset Rounds rounds_of RoundsDataset RoundSettings",
        "recipe_utils.policy.sampler": "ModelSampler sampled_reward",
    }
)
