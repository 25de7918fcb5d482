"""Samples are checked as they are loaded, by their name; workers change nothing."""

import json

import pytest
import tiny
import torch
from omegaconf import OmegaConf
from torch.utils.data import ConcatDataset, Subset

from recipe_utils.data.inspect_samples import report_of
from recipe_utils.examples.stdlib_docs import docstring_tokenizer
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.policy.rounds import rollout_dataset
from recipe_utils.settings.problems import ConfigError
from recipe_utils.text.limits import ModelLimits
from recipe_utils.text.mixture import Mixture, load_dataset
from recipe_utils.text.reader import TextReader, check_sample
from recipe_utils.update_steps.objective import Collator
from recipe_utils.update_steps.samples import (
    CheckedDataset,
    Facts,
    SampleError,
    SkippedSampleError,
    facts_of,
    load_samples,
    unread,
)
from recipe_utils.update_steps.step import Microbatch

LIMITS = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())
GOOD = tiny.make_samples(2)
BAD = {"tokens": [1, 2], "labels": [1]}
WITHOUT = {"tokens": [1], "labels": [1]}


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "questions.json").write_text('[["Does it?", "Yes, it does."]]')
    return docstring_tokenizer(str(folder / "tokenizer.model"), str(folder / "questions.json"), 512)


def prepare(sample, name, at):
    check_sample(sample, name, tiny.IGNORE, LIMITS)
    return sample


def checked(samples, **options):
    return CheckedDataset(tiny.Samples(samples), "dataset", prepare, **options)


def test_an_error_of_a_dataset_is_chained_to_one_that_names_the_sample():
    dataset = checked([{}])
    expected = r"sample 2 of dataset: IndexError: list index out of range"
    with pytest.raises(SampleError, match=expected) as raised:
        dataset[2]
    assert isinstance(raised.value.__cause__, IndexError)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"input": "a", "output": "b"}\n{"input": \n', "JSON parse error"),
        ('{"input": "a", "output": "b"}\n'.encode("utf-16"), "utf-8"),
        (b"", ""),
    ],
)
def test_a_file_that_datasets_cannot_read_is_named_with_the_cause(content, reason, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    component = "torchtune.datasets.instruct_dataset"
    files = {"source": "json", "data_files": str(path), "split": "train"}
    cfg = OmegaConf.create({"_component_": component, **files})
    with pytest.raises(ValueError, match=f"{path} cannot be read: .*{reason}"):
        load_dataset(cfg, tiny.tiny_tokenizer())


@pytest.mark.parametrize("content", [None, 3])
def test_a_message_without_text_does_not_train_the_one_before(content, chat_tokenizer, tmp_path):
    path = tmp_path / "mine.jsonl"
    answer = {"role": "assistant", "content": content}
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}, answer]}))
    cfg = OmegaConf.create(
        {
            "_component_": "torchtune.datasets.chat_dataset", "source": "json", "split": "train",
            "data_files": str(path), "conversation_column": "messages", "conversation_style": "openai",
        }
    )  # fmt: skip
    dataset = CheckedDataset(load_dataset(cfg, chat_tokenizer), "dataset", prepare)
    with pytest.raises(SampleError, match=r"sample 0 of dataset: .*content of a message is .* row 1"):
        dataset[0]


def test_samples_come_in_the_order_of_the_indices_with_and_without_workers():
    samples = tiny.make_samples(12)
    indices_per_step = [[3, 0, 7], [], [11], [5, 5, 2, 1], [4]]
    expected = [[samples[i] for i in step] for step in indices_per_step]
    for num_workers in (0, 2):
        assert list(load_samples(checked(samples), indices_per_step, num_workers)) == expected


def skip_without_targets(sample, name, at):
    if sample["tokens"] == [0]:
        raise SkippedSampleError(f"{name}: it has no target")
    return prepare(sample, name, at)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_without_targets_are_skipped_and_named_once_up_to_twenty(num_workers, caplog):
    samples = [{"tokens": [0], "labels": [0]} for _ in range(25)]
    samples[3:3] = tiny.make_samples(2)
    dataset = CheckedDataset(tiny.Samples(samples), "dataset", skip_without_targets)
    for _ in range(2):
        steps = [list(range(9)), list(range(9, 27))]
        assert list(load_samples(dataset, steps, num_workers)) == [
            samples[3:5],
            [],
        ]
    named = [text for text in caplog.messages if "it has no target (skipped)" in text]
    assert len(named) == len(set(named)) == 20
    assert caplog.messages[-1] == "dataset: further skipped samples are not logged"
    assert len(caplog.messages) == 21
    assert report_of(dataset, Checks(), (), has_remarks=False).example == 3


READER = TextReader(columns={"weights": 1.0})


class Checks(Collator):
    """Counts the targets of a sample."""

    counts = ("target_tokens",)

    def content(self, sample):
        return READER.content(READER.prepare(sample, "sample"))

    def collate(self, samples):
        return [Microbatch({}, None, {"target_tokens": len(samples[0]["labels"]) - 1})]


Checks.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("samples", "skips_bad", "example"),
    [
        ([BAD, GOOD[0], BAD], True, 1),
        ([WITHOUT, GOOD[0]], False, 1),
        ([BAD, GOOD[0]], False, 0),  # its error is raised when its update step is prepared
        ([BAD, BAD], True, "none of its 2 samples .*1 labels for 2 tokens.*train_on_input"),
        ([WITHOUT], False, "none of its 1 samples .*it has no target.*train_on_input"),
    ],
)
def test_some_sample_has_targets_or_the_last_cause_is_named(samples, skips_bad, example):
    dataset = checked(samples, skips_bad=skips_bad)
    if isinstance(example, int):
        assert report_of(dataset, Checks(), (), has_remarks=False).example == example
        return
    with pytest.raises(ValueError, match=example):
        report_of(dataset, Checks(), (), has_remarks=False)


def test_a_dataset_whose_hashed_samples_are_all_bad_ends_the_run_at_once():
    with pytest.raises(SampleError, match=r"^sample 0 of .*1 labels for 2 tokens"):
        report_of(checked([BAD, BAD]), Checks(), (2,), has_remarks=False)
    assert report_of(checked([BAD, BAD, GOOD[0]]), Checks(), (3,), has_remarks=True).example == 2


def test_the_hash_depends_on_three_samples_of_each_source_and_their_keys():
    samples = tiny.make_samples(5)
    relabeled = [dict(sample) for sample in samples]
    relabeled[-1]["labels"] = [1] * len(samples[-1]["labels"])

    def hashed(samples, lengths=(5,)):
        return report_of(checked(samples), Checks(), lengths, has_remarks=False).hash_of_samples

    assert hashed(samples) == "0739a5d06d47ed86"  # as checkpoints of earlier commits have it
    assert hashed(samples) != hashed(relabeled)
    changed = [*samples[:3], samples[4], samples[4]]
    assert hashed(changed) == hashed(samples)
    assert hashed(changed, (2, 3)) != hashed(samples, (2, 3))
    everything = report_of(checked(samples), Checks(), (5,), has_remarks=True)
    assert everything.hash_of_samples == hashed(samples)


def other_hash_of(**values):
    sample = {"tokens": [1, 2], "labels": [1, 2], "mask": [True], "is_cut": False, **values}
    return report_of(checked([sample]), Checks(), (1,), has_remarks=False).other_content_hash


IMAGE = torch.arange(6.0).view(2, 3)
DIFFERENT = {
    "weights": [{"weights": [1, 0.5]}, {"weights": [1, 0.25]}, {}],
    "images": [{"encoder_input": {"images": [[IMAGE + n]], "aspect_ratio": [[1]]}} for n in range(2)],
    "shapes": [{"images": IMAGE}, {"images": IMAGE.T.reshape(3, 2)}, {"images": IMAGE.flatten()}],
    "bf16": [{"image": IMAGE.bfloat16()}, {"image": (IMAGE + 1).bfloat16()}],
    "texts": [{"prompts": ["a", "b"]}, {"prompts": ["ab"]}, {"prompts": ["a", ["b"]]}, {"prompt": ["a", "b"]}],
    "lengths": [{"documents": [(1, [2, 3]), 4]}, {"documents": [(1, [2]), 3, 4]}, {"documents": [1, 2, 3, 4]}],
    "numbers and texts": [{"id": 1}, {"id": "1"}, {"id": [1]}, {"id": None}],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_all_that_a_sample_gives_to_the_training_is_hashed(kind):
    hashes = [other_hash_of(**values) for values in DIFFERENT[kind]]
    assert len({*hashes, other_hash_of(further=0)}) == len(hashes) + 1


def test_a_hash_does_not_depend_on_the_order_of_keys_and_on_places_of_objects():
    first, second = ({"a": object(), "b": (1, 0.5), ("no", "text"): 1}, {"a": object(), "b": [1, 0.5]})
    assert other_hash_of(part=first, more=IMAGE) == other_hash_of(more=IMAGE.clone(), part=second)


class Opens:
    """Opens its file, a list, at the first read."""

    def __init__(self, parts=()):
        self.parts, self.file = parts, None

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.file = self.file or [index]
        return self.file


def test_each_reader_has_what_it_opens_for_itself_and_shares_the_rest():
    inner, rows = Opens(), [{"tokens": [1]}] * 3
    outer = Opens((inner, Opens()))
    outer.rows = rows
    copies = [unread(outer) for _ in range(2)]
    for copy in copies:
        assert (copy[0], copy.parts[0][0]) == ([0], [0])
        assert copy.rows is rows
    assert copies[0].parts[0].file is not copies[1].parts[0].file
    assert (outer.file, inner.file) == (None, None)
    many = Opens([Opens()] * 1001)  # samples, not datasets
    assert unread(many).parts is many.parts


# ---- Facts ---------------------------------------------------------------------------------------


class Wrapper:
    """Dataset of a user's own."""

    def __init__(self, dataset):
        self.inside = dataset

    def __len__(self):
        return len(self.inside)

    def __getitem__(self, index):
        return self.inside[index]


class EverySecond(Wrapper):
    def __len__(self):
        return len(self.inside) // 2


ALL = Facts(True, frozenset({"logprobs", "reward"}), True, {"": "hash of a file", ".b": "another"})
OF_INDEX = ALL._replace(takes_place=True)
FIRST = {"content": {".0": "hash of a file", ".0.b": "another"}}
NAMED = {"content": {".a": "hash of a file", ".a.b": "another"}}


@pytest.mark.parametrize(
    ("wrap", "facts", "changes"),
    [
        *((wrap, OF_INDEX, {}) for wrap in (Wrapper, lambda each: Wrapper(Wrapper(each)))),
        *((wrap, ALL, {}) for wrap in (EverySecond, lambda each: Subset(each, [1, 0]))),
        *((wrap, ALL, FIRST) for wrap in (lambda each: ConcatDataset([each]), lambda each: Wrapper([each]))),
        (lambda each: Mixture([each], [{"name": "a"}]), ALL, NAMED),
        (lambda each: ConcatDataset([each, tiny.Samples(GOOD)]), ALL, {**FIRST, "fields": None}),
        (EverySecond, OF_INDEX, "dataset: EverySecond of WithFacts has other indices, whose names and places"),
        (lambda each: Subset(each, [1, 0]), OF_INDEX, "dataset: Subset of WithFacts has other indices"),
        (lambda each: EverySecond(Mixture([each], [{"name": "a"}])), ALL, "EverySecond of Mixture has other indices"),
    ],
)
def test_a_wrapper_has_the_facts_of_what_it_wraps_or_is_named(wrap, facts, changes):
    dataset = wrap(tiny.WithFacts(GOOD, facts))
    if isinstance(changes, str):
        with pytest.raises(ConfigError, match=changes):
            facts_of(dataset)
    else:
        assert facts_of(dataset)._replace(sources=None) == facts._replace(**changes)


def test_wrapped_mixtures_have_names_and_wrapped_rollouts_have_sequences(tmp_path):
    mixture = Mixture([tiny.Samples(GOOD), tiny.Samples(GOOD)], [{"name": "a"}, {"name": "b"}])
    wrapped = CheckedDataset(Wrapper(Wrapper(mixture)), "dataset", prepare)
    assert wrapped.name_of(3) == "sample 1 of dataset.b"
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"prompt_ids": [1], "completion_ids": [[2]], "rewards": [1]}))
    for path, groups in (("rollouts.jsonl", None), (".", 3)):
        rollouts = rollout_dataset(None, str(tmp_path / path), groups_per_round=groups)
        assert facts_of(Wrapper(rollouts)) == rollouts.facts()
        assert rollouts.facts().has_sequences
