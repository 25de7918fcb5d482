from recipe_utils.reference.source import Reference as Reference
from recipe_utils.reference.source import ReferenceSettings as ReferenceSettings
from recipe_utils.reference.source import build_reference as build_reference
