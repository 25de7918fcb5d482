"""Rows of text that several ranks compute together, because one sample is too long for one rank."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "row_groups": "recipe_utils.long_rows.exchange",
    }
)
