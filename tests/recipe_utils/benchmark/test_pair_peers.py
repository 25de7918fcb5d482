import numpy as np
import pytest
import tiny
import torch
import yaml
from omegaconf import OmegaConf
from recipe_runs import tiny_dpo_config

from recipe_utils.benchmark.crafted_pairs import CASES, CraftedPairs
from recipe_utils.benchmark.lineup import LineupSettings
from recipe_utils.benchmark.real_lengths import PRESETS, PairsOfRealLengths
from recipe_utils.benchmark.token_audit import contents_of_pairs
from recipe_utils.data.pairs.collator import num_shared_tokens
from recipe_utils.settings.problems import ConfigError
from recipe_utils.settings.read import read_settings

SIDES = ("chosen", "rejected")


def arrays_of(pair):
    return {key: np.array(values) for key, values in pair.items()}


# ---- What an update step holds ----------------------------------------------------------------------


def test_tokens_that_are_shared_are_counted_once_and_their_targets_twice():
    pair = {
        "chosen_input_ids": [5, 6, 7, 8], "chosen_labels": [-100, 6, 7, 8],
        "rejected_input_ids": [5, 6, 7, 9, 10], "rejected_labels": [-100, 6, 7, 9, 10],
    }  # fmt: skip
    whole = contents_of_pairs([pair], 0, -100, shares_prefixes=False)
    shared = contents_of_pairs([pair], 0, -100, shares_prefixes=True)
    assert (whole.num_target_tokens, whole.num_real_tokens) == (7, 9)
    assert (shared.num_target_tokens, shared.num_real_tokens) == (
        7,
        7,
    )  # all but the last in common
    once = [{**pair, "rejected_input_ids": [7, 9, 10], "rejected_labels": [7, 9, 10]}]
    fed = contents_of_pairs(once, 0, -100, shares_prefixes=False).fingerprint
    assert fed + shared.fingerprint_of_shared == whole.fingerprint == shared.fingerprint


# ---- The lineup -------------------------------------------------------------------------------------


@pytest.fixture
def read(tmp_path):
    """Reads a lineup over the tiny config of pairs, with changes."""

    def read(base=None, **changes):
        base = {"ref_checkpointer": None, **(base or {})}
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny_dpo_config(tmp_path, **base)))
        config = {
            "output_dir": f"{tmp_path}/out",
            "update_step_recipe": "full_dpo_update_step",
            "update_step_config": f"{tmp_path}/base.yaml",
            "peers": {"ours": {"kind": "update_step"}},
            "num_update_steps": 2,
            **changes,
        }
        return read_settings(OmegaConf.create(config), LineupSettings)

    return read


def test_peers_that_share_prefixes_hold_the_same_pairs_in_fewer_tokens(read):
    peers = {
        "stock": {"kind": "stock"},
        "in_order": {"kind": "update_step"},
        "packed": {"kind": "update_step", "microbatching": "packed", "prefix_sharing": False},
        "shared": {"kind": "update_step", "microbatching": "packed"},
    }
    contents = read(peers=peers).lineup.contents
    assert contents["stock"] is contents["in_order"] is contents["packed"]
    for whole, shared in zip(contents["stock"], contents["shared"], strict=True):
        assert shared.num_target_tokens == whole.num_target_tokens
        assert shared.num_real_tokens < whole.num_real_tokens
        assert shared.fingerprint == whole.fingerprint


def test_pairs_have_kinds_and_keys_of_their_own(read):
    with pytest.raises(ConfigError) as caught:
        read(
            base={"sft_loss_weight": 1.0},
            peers={"hf": {"kind": "hf_trainer"}, "trl": {"kind": "trl", "padding_free": True}},
        )
    first, second, third = map(str, caught.value.problems)
    assert first.startswith("overrides.sft_loss_weight=1.0: only kind=update_step adds it")
    assert second == "peers.hf.kind=hf_trainer: set it to one of stock, update_step, trl, limit"
    assert third.startswith("peers.trl.padding_free=True: kind=trl has no such key")


def test_adapters_on_pairs_are_left_to_ours(read):
    peers = {"ours": {"kind": "update_step"}, "stock": {"kind": "stock"}}
    skipped = read(base={"model": tiny.adapted(tiny.MODEL)}, peers=peers).lineup.skipped
    assert skipped == {"stock": "skipped: trains no adapters on pairs"}


# ---- Datasets ---------------------------------------------------------------------------------------


def test_crafted_pairs_are_hard_as_their_cases_say():
    dataset = CraftedPairs(None, num_token_ids=67, max_seq_len=64, num_ranks=2)
    cases = dataset.cases()
    assert list(cases) == list(CASES)
    assert [len(pairs) for pairs in cases.values()] == [16, 16, 16, 6]
    pairs = [arrays_of(dataset[i]) for i in range(len(dataset))]
    assert sum(len(each) for each in cases.values()) == len(pairs)
    for pair in pairs:
        assert max(len(pair[f"{side}_input_ids"]) for side in SIDES) <= 64
        assert all((pair[f"{side}_labels"][1:] != -100).any() for side in SIDES)
    assert [num_shared_tokens(arrays_of(p)) for p in cases["an_equal_pair_left_out"]].count(
        None
    ) == 2
    for pair in map(arrays_of, cases["targets_in_the_shared_part"]):
        shared = pair["chosen_labels"][: num_shared_tokens(pair) + 1]
        assert (shared != -100).any()


@pytest.mark.parametrize(
    ("preset", "chosen", "rejected", "shared", "spread"),
    [("hh_rlhf", 135, 142, 98, 3.0), ("english_mix", 546, 563, 182, 2.5)],
)
def test_lengths_are_spread_as_those_of_real_data(preset, chosen, rejected, shared, spread):
    dataset = PairsOfRealLengths(None, preset, num_pairs=1000, num_token_ids=67, seed=1)
    pairs = [arrays_of(dataset[i]) for i in range(len(dataset))]
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
    assert torch.tensor(dataset[0]["chosen_input_ids"]).max() < 67


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="preset=mine: unknown; set it to one of hh_rlhf"):
        PairsOfRealLengths(None, preset="mine")
