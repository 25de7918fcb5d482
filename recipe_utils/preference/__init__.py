"""Preference pairs: dataset, rows, losses and reference."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "IPOLoss": "recipe_utils.preference.losses",
        "NormalizedDPOLoss": "recipe_utils.preference.losses",
        "ORPOLoss": "recipe_utils.preference.losses",
        "RobustDPOLoss": "recipe_utils.preference.losses",
        "SimPOLoss": "recipe_utils.preference.losses",
        "pair_dataset": "recipe_utils.preference.datasets:PairDataset",
    }
)
