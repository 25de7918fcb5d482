from recipe_utils.reference.reference import Reference as Reference
from recipe_utils.reference.reference import ReferenceSettings as ReferenceSettings
from recipe_utils.reference.reference import build_reference as build_reference
