from recipe_utils.losses.attach import build_loss as build_loss
from recipe_utils.losses.cross_entropy import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from recipe_utils.losses.log_probs import LinearLogProbs as LinearLogProbs
