"""Preference pairs: dataset, rows, losses and reference."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "build_reference": "recipe_utils.preference.reference",
        "check_is_pair": "recipe_utils.preference.pairs",
        "IPOLoss": "recipe_utils.preference.losses",
        "layout_of": "recipe_utils.preference.pairs",
        "METRICS": "recipe_utils.preference.losses",
        "make_preference_loss": "recipe_utils.preference.losses",
        "NormalizedDPOLoss": "recipe_utils.preference.losses",
        "ORPOLoss": "recipe_utils.preference.losses",
        "pair_collator": "recipe_utils.preference.pairs",
        "pair_dataset": "recipe_utils.preference.datasets:PairDataset",
        "PairSettings": "recipe_utils.preference.pairs",
        "PreferenceLoss": "recipe_utils.preference.losses",
        "PreferenceSettings": "recipe_utils.preference.losses",
        "reference_checkpointer": "recipe_utils.preference.reference",
        "ReferenceSettings": "recipe_utils.preference.reference",
        "RobustDPOLoss": "recipe_utils.preference.losses",
        "SimPOLoss": "recipe_utils.preference.losses",
    }
)
