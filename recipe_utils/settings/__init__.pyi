from recipe_utils.settings.components import Component as Component
from recipe_utils.settings.keys import STRICT as STRICT
from recipe_utils.settings.problems import Problem as Problem
from recipe_utils.settings.problems import build as build
from recipe_utils.settings.read import read_settings as read_settings
from recipe_utils.torchtune_names import instantiate as instantiate
