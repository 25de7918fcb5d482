"""Tokenizers beside the weights of two models are compared, and the first token that differs is named."""

import shutil
from types import SimpleNamespace

import pytest
from recipe_runs import DPO, KD, refusal
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from recipe_utils.models.vocabulary import check_same_tokens

VOCABULARY = {f"token {i}": i for i in range(20)}
PLACE = 13
NAMES = ("student", "teacher")


def beside_weights(folder, vocabulary=VOCABULARY):
    """Returns a checkpointer of a folder with a ``tokenizer.json``."""
    folder.mkdir(exist_ok=True)
    Tokenizer(WordLevel(vocabulary, unk_token="token 0")).save(str(folder / "tokenizer.json"))
    return SimpleNamespace(_checkpoint_dir=folder)


def with_token(token):
    """Returns the vocabulary with another token in one place; None makes a hole."""
    others = {name: index for name, index in VOCABULARY.items() if index != PLACE}
    return others if token is None else {**others, token: PLACE}


@pytest.mark.parametrize(
    ("vocabulary", "is_same"),
    [
        (VOCABULARY, True),
        ({**VOCABULARY, "<|one|>": 20, "": 21}, True),
        (with_token("<|reserved_special_token_2|>"), True),
        (with_token("[reserved]"), True),
        (with_token(None), True),
        (with_token("Ġreserved"), False),
        ({**VOCABULARY, "token 5": 6, "token 6": 5}, False),
    ],
    ids=["same", "longer", "reserved", "in brackets", "hole", "the word reserved", "swapped"],
)
def test_only_other_tokens_are_differences_on_either_side(vocabulary, is_same, tmp_path):
    pair = beside_weights(tmp_path / "one"), beside_weights(tmp_path / "other", vocabulary)
    for own, other in (pair, pair[::-1]):
        if is_same:
            assert check_same_tokens(own, other, NAMES)
            continue
        with pytest.raises(
            ValueError,
            match=r"^.*(one|other)/tokenizer.json: token (5|13) is '.*' in the student's and '.*' in the teacher's; both must share",
        ):
            check_same_tokens(own, other, NAMES)


def test_without_both_files_nothing_is_compared(tmp_path):
    own, without = beside_weights(tmp_path / "one"), SimpleNamespace(_checkpoint_dir=tmp_path)
    for other in (without, SimpleNamespace(_checkpoint_dir=None), None):
        assert not check_same_tokens(own, other, NAMES)
        assert not check_same_tokens(other, own, NAMES)


@pytest.mark.parametrize(("recipe", "key"), [(DPO, "ref_checkpointer"), (KD, "teacher_checkpointer")])
def test_a_frozen_model_of_another_tokenizer_is_refused(recipe, key, tiny_dpo_config, tiny_kd_config, tmp_path):
    config = {DPO: tiny_dpo_config, KD: tiny_kd_config}[recipe]()
    for each, token in (("checkpointer", "one"), (key, "other")):
        shutil.copytree(config[each]["checkpoint_dir"], tmp_path / each)
        beside_weights(tmp_path / each, with_token(token))
        config[each] = {**config[each], "checkpoint_dir": str(tmp_path / each)}
    names = {DPO: ("policy", "reference"), KD: ("student", "teacher")}[recipe]
    expected = "token 13 is 'one' in the {}'s and 'other' in the {}'s".format(*names)
    assert expected in refusal(config, recipe)
