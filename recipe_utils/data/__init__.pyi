from recipe_utils.data.collators import text_collator as text_collator
from recipe_utils.data.dataset_weights import mean_of_datasets as mean_of_datasets
from recipe_utils.data.dataset_weights import problems_of_weights as problems_of_weights
from recipe_utils.data.loaders import build_loader as build_loader
from recipe_utils.data.loaders import build_loaders as build_loaders
from recipe_utils.data.loaders import load_datasets as load_datasets
from recipe_utils.update_steps.samples import Facts as Facts
from recipe_utils.update_steps.samples import facts_of as facts_of
