"""Configuration: keys with types, defaults and checks, read from YAML."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "build": "recipe_utils.settings.problems",
        "Component": "recipe_utils.settings.components",
        "instantiate": "recipe_utils.torchtune_names",
        "naming": "recipe_utils.settings.problems",
        "Problem": "recipe_utils.settings.problems",
        "read_settings": "recipe_utils.settings.read",
        "STRICT": "recipe_utils.settings.keys",
    }
)
