"""Process groups, meshes and sharding."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.parallel.fsdp": "gradient_sync",
        "recipe_utils.parallel.process_group": "means_over_ranks",
        "recipe_utils.parallel.ranks": "join_ranks",
        "recipe_utils.parallel.settings": "RankSettings",
        "recipe_utils.parallel.to_device": "to_device_ahead",
    }
)
