"""Old names, until nothing imports them."""

from collections.abc import Callable
from typing import Any

from recipe_utils.settings.describe import key_table as key_table
from recipe_utils.settings.describe import settings_of as settings_of
from recipe_utils.settings.keys import AS_WRITTEN as AS_WRITTEN
from recipe_utils.settings.keys import STRICT as ROOM
from recipe_utils.settings.keys import Count as Count
from recipe_utils.settings.keys import CountOrZero as CountOrZero
from recipe_utils.settings.keys import Positive as Positive
from recipe_utils.settings.keys import all_keys_of as all_keys_of
from recipe_utils.settings.problems import ConfigError as ConfigError
from recipe_utils.settings.problems import collected_problems
from recipe_utils.settings.problems import naming as naming
from recipe_utils.settings.read import check_keys as check_keys
from recipe_utils.settings.read import read_settings as read_settings

__all__ = ["ROOM"]


def make_all(**makers: Callable[[], Any]) -> tuple[Any, ...]:
    """Calls each maker of a component and returns what they made, in their order."""
    with collected_problems() as build:
        made = tuple(build(key, make) for key, make in makers.items())
    return made
