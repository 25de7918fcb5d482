"""Configuration: keys with types, defaults and checks, read from YAML."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.settings.components": "Component",
        "recipe_utils.settings.keys": "STRICT",
        "recipe_utils.settings.problems": "build naming Problem",
        "recipe_utils.settings.read": "read_settings",
        "recipe_utils.torchtune_names": "instantiate",
    }
)
