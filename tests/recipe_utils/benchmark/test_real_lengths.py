import numpy as np
import pytest

from recipe_utils.benchmark.real_lengths import PRESETS, PairsOfRealLengths
from recipe_utils.data.pairs.collator import num_shared_tokens


@pytest.mark.parametrize(
    ("preset", "chosen", "rejected", "shared", "spread"),
    [("hh_rlhf", 135, 142, 98, 3.0), ("english_mix", 546, 563, 182, 2.5)],
)
def test_lengths_are_spread_as_those_of_real_data(preset, chosen, rejected, shared, spread):
    dataset = PairsOfRealLengths(None, preset, num_pairs=1000, num_token_ids=67, seed=1)
    pairs = [{key: np.array(values) for key, values in dataset[i].items()} for i in range(1000)]
    assert None not in map(num_shared_tokens, pairs)
    assert np.median([num_shared_tokens(pair) for pair in pairs]) == pytest.approx(shared, rel=0.1)
    for side, median in (("chosen", chosen), ("rejected", rejected)):
        lengths = [len(pair[f"{side}_input_ids"]) for pair in pairs]
        lower, middle, upper = np.quantile(lengths, [0.25, 0.5, 0.75])
        assert middle == pytest.approx(median, rel=0.1)
        assert upper / lower == pytest.approx(spread, rel=0.15)
        assert max(lengths) == PRESETS[preset].longest
    alike = [
        pair for pair in pairs if (pair["chosen_labels"][: num_shared_tokens(pair)] != -100).any()
    ]
    assert 0.1 < len(alike) / len(pairs) < 0.3
    again = PairsOfRealLengths(None, preset, num_pairs=3, num_token_ids=67, seed=1)
    assert again[2] == dataset[2]
    assert max(dataset[0]["chosen_input_ids"]) < 67


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="preset=mine: unknown; set it to one of hh_rlhf"):
        PairsOfRealLengths(None, preset="mine")
