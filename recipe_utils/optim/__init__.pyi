from recipe_utils.optim.adamw_8bit import AdamW8bit as AdamW8bit
from recipe_utils.optim.grad_norm import grad_norms as grad_norms
from recipe_utils.optim.optimizer import OptimizerSettings as OptimizerSettings
from recipe_utils.optim.split import Split as Split
from recipe_utils.optim.stepper import Stepper as Stepper
