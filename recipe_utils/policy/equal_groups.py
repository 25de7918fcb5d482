"""Groups without advantages, which cost no forward and stay in what the loss is divided by.

Example: four answers of 100 tokens each with rewards 1, 1, 1, 1 have advantages of 0, and the policy term has no gradient.
One sequence of two tokens takes their place. Beside its only target, which has the advantage 0, are the 400 tokens, the 4
answers and the group, so that the other groups of the update step weigh what they would weigh beside all 400 tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from recipe_utils.torchtune_names import IGNORE_INDEX

_SUMMED = ("answers", "groups", "rewards", "equal_groups")


class WithoutEqualGroups(Dataset[Any]):
    """Rollouts of ``dataset``, of which groups whose advantages are all 0 become one short sequence.

    Exact for losses whose terms all have the advantage as a factor: without a KL term.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Returns the sample; a group without advantages as one short sequence."""
        sample = self.dataset[index]
        sequences = sample.get("sequences", ()) if isinstance(sample, Mapping) else ()
        if not sequences or any(np.any(s.get(key, 0)) for s in sequences for key in ("advantages", "teacher")):
            return sample
        return {"sequences": [_standing_for(sequences)]}


def _standing_for(sequences: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a sequence of two tokens with one target, beside which are the sums of all."""
    first = sequences[0]
    num_trained = sum(int((np.asarray(s["labels"])[1:] != IGNORE_INDEX).sum()) for s in sequences)
    sums = {name: float(sum(np.sum(s[name]) for s in sequences)) for name in _SUMMED if name in first}
    nothing = {name: 0.0 for name in first if name not in ("tokens", "labels", "temperatures", *sums)}
    beside = {**nothing, **sums, "answer_tokens": num_trained, "measured": 0.0}
    tokens = first["tokens"][:2]
    return {"tokens": tokens, "labels": [IGNORE_INDEX, tokens[1]], **{name: [0.0, x] for name, x in beside.items()}}
