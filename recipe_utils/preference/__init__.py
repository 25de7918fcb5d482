"""Preference pairs: dataset, rows, losses and reference."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.preference.datasets": "pair_dataset=PairDataset",
        "recipe_utils.preference.losses": "IPOLoss make_preference_loss METRICS NormalizedDPOLoss "
        "ORPOLoss PAIRS PreferenceLoss PreferenceSettings RobustDPOLoss SimPOLoss",
        "recipe_utils.preference.pairs": "check_is_pair layout_of pair_collator PairSettings",
        "recipe_utils.preference.reference": "build_reference ReferenceSettings",
    }
)
