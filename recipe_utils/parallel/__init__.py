"""Process groups, meshes and sharding."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "gradient_sync": "recipe_utils.parallel.fsdp",
        "join_ranks": "recipe_utils.parallel.ranks",
        "means_over_ranks": "recipe_utils.parallel.process_group",
        "RankSettings": "recipe_utils.parallel.settings",
        "to_device_ahead": "recipe_utils.parallel.to_device",
    }
)
