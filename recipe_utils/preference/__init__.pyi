from recipe_utils.preference.pair_files import PairDataset as PairDataset
from recipe_utils.preference.pair_losses import METRICS as METRICS
from recipe_utils.preference.pair_losses import PAIRS as PAIRS
from recipe_utils.preference.pair_losses import IPOLoss as IPOLoss
from recipe_utils.preference.pair_losses import NormalizedDPOLoss as NormalizedDPOLoss
from recipe_utils.preference.pair_losses import ORPOLoss as ORPOLoss
from recipe_utils.preference.pair_losses import PreferenceSettings as PreferenceSettings
from recipe_utils.preference.pair_losses import RobustDPOLoss as RobustDPOLoss
from recipe_utils.preference.pair_losses import SimPOLoss as SimPOLoss
from recipe_utils.preference.pair_losses import build_loss as build_loss
from recipe_utils.preference.pairs import PairSettings as PairSettings
from recipe_utils.preference.pairs import check_is_pair as check_is_pair
from recipe_utils.preference.pairs import pair_collator as pair_collator

pair_dataset = PairDataset
