"""Rows with images as other tools write them: one conversation, in any of their forms; others are refused by line."""

import base64
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from recipe_utils.text.conversations.file_datasets import ConversationDataset
from recipe_utils.text.conversations.tokenizer import FolderTokenizer
from recipe_utils.update_steps.samples import SampleError
from tests.support.image_folders import write_image_folder

PICTURES = {
    f"{name}.png": Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, 24, 3), dtype=np.uint8))
    for seed, (name, size) in enumerate({"cat": 40, "dog": 16}.items())
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return FolderTokenizer(str(write_image_folder(tmp_path_factory.mktemp("folder"), "qwen2_vl")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    for name, image in PICTURES.items():
        image.save(path / name)
    Image.fromarray(np.zeros((8, 8), dtype=np.uint16)).save(path / "deep.png")
    return path


def content_of(name):
    return PICTURES[name].tobytes("raw")


def data_url(folder, name):
    return "data:image/png;base64," + base64.b64encode((folder / name).read_bytes()).decode()


def user(*parts):
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Pets."}
MARK = {"type": "image"}


def rows_of(folder):
    """Returns one conversation in all forms, by name."""
    cat, dog = "cat.png", str(folder / "dog.png")
    llava = [{"from": "human", "value": "Look:<image> and <image>?"}, {"from": "gpt", "value": "Pets."}]
    marked = [user("Look:", MARK, " and ", MARK, "?"), ANSWER]
    return {
        "transformers": {"messages": [user("Look:", {**MARK, "path": cat}, " and ", {**MARK, "url": dog}, "?"), ANSWER]},
        "image": {"messages": [user("Look:", {**MARK, "image": cat}, " and ", {**MARK, "image": dog}, "?"), ANSWER]},
        "OpenAI": {
            "messages": [
                user(
                    "Look:",
                    {"type": "image_url", "image_url": {"url": data_url(folder, "cat.png")}},
                    " and ",
                    {"type": "image_url", "image_url": data_url(folder, "dog.png")},
                    "?",
                ),
                ANSWER,
            ]
        },
        "marks and a column": {"messages": marked, "images": [cat, dog]},
        "one mark and a part": {"messages": [user("Look:", MARK, " and ", {**MARK, "path": dog}, "?"), ANSWER], "image": cat},
        "LLaVA": {"conversations": llava, "image": [cat, dog]},
        "ShareGPT": {"conversations": llava, "images": [cat, {"path": dog}]},
        "prompt": {"prompt": "Look:<image> and <image>?", "completion": "Pets.", "images": [cat, dog]},
        "Anthropic": {
            "messages": [
                user(
                    "Look:",
                    {**MARK, "source": {"type": "base64", "data": data_url(folder, "cat.png").partition(",")[2]}},
                    " and ",
                    {**MARK, "source": {"type": "url", "url": f"file://{dog}"}},
                    "?",
                ),
                ANSWER,
            ]
        },
        "in front": {"messages": [SYSTEM, user({**MARK, "path": cat}, {**MARK, "path": dog}, "What?"), ANSWER]},
        "TRL": {"messages": [SYSTEM, {"role": "user", "content": "What?"}, ANSWER], "images": [cat, dog]},
        "TRL's prompt": {"prompt": [SYSTEM, {"role": "user", "content": "What?"}], "completion": [ANSWER], "images": [cat, dog]},
        "question": {"system": "Be brief.", "question": "What?", "answer": "Pets.", "image": [cat, dog]},
        "FineVision": {
            "images": [cat, dog], "system": "Be brief.", "texts": [{"user": "What?", "assistant": "Pets."}],
            "source": "coco", "relevance_ratings": [1], "relevance_min": 1,
        },
    }  # fmt: skip


FORMS = {
    "transformers": ["image", "OpenAI", "Anthropic", "marks and a column", "one mark and a part", "LLaVA", "ShareGPT", "prompt"],
    "in front": ["TRL", "TRL's prompt", "question", "FineVision"],
}  # fmt: skip
"""Names of rows that are the same conversation as another row."""


def dataset_of(tokenizer, path, rows, **options):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ConversationDataset(tokenizer, str(path), **options)


def of_sample(sample):
    images = sample["image_inputs"]
    return (
        [np.asarray(sample[key]).tolist() for key in ("tokens", "labels")],
        images.identities.tolist(),
        images.pixels[0].sizes,
    )


@pytest.mark.parametrize(("name", "like"), [(name, like) for like, names in FORMS.items() for name in names])
def test_each_form_of_a_row_is_the_same_sample(tokenizer, folder, tmp_path, name, like):
    rows = rows_of(folder)
    dataset = dataset_of(tokenizer, tmp_path / "a.jsonl", [rows[like], rows[name]], image_folder=str(folder))
    assert of_sample(dataset[0]) == of_sample(dataset[1])
    assert of_sample(dataset[0])[2] == [(24, 40), (24, 16)]


@pytest.mark.parametrize("split_turns", [True, "shared"])
def test_turns_have_images(tokenizer, folder, tmp_path, split_turns):
    messages = [user({**MARK, "path": "cat.png"}, "?"), ANSWER, user({**MARK, "path": "dog.png"}), ANSWER]
    dataset = dataset_of(
        tokenizer, tmp_path / "a.jsonl", [{"messages": messages}], split_turns=split_turns, image_folder=str(folder)
    )
    samples = dataset[0]["sequences"] if split_turns == "shared" else [dataset[0], dataset[1]]
    assert [len(each["image_inputs"].pixels[0].sizes) for each in samples] == [1, 2]


def test_a_tool_returns_an_image(tokenizer, folder, tmp_path):
    """Its part was printed as JSON text. Anthropic's result is a turn of the tool, too."""
    openai = {"role": "tool", "content": [{"type": "text", "text": "Seen:"}, {**MARK, "path": "cat.png"}]}
    anthropic = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": openai["content"]}]}
    rows = [{"messages": [user("Look"), {**ANSWER, "weight": 0}, turn, ANSWER]} for turn in (openai, anthropic)]
    dataset = dataset_of(tokenizer, tmp_path / "a.jsonl", rows, image_folder=str(folder))
    assert of_sample(dataset[0]) == of_sample(dataset[1])
    text = tokenizer.decode(dataset[0]["tokens"], skip_special_tokens=False)
    assert "tool\nSeen:<|vision_start|><|image_pad|>" in text


def test_a_table_keeps_images_as_bytes_until_a_sample_needs_them(tokenizer, folder, tmp_path):
    row = {"messages": [{"role": "user", "content": "<image>Look:<image>"}, ANSWER], "images": [*PICTURES.values()]}
    table = datasets.Dataset.from_list([row], features=datasets.Features({
        "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
        "images": datasets.List(datasets.Image()),
    }))  # fmt: skip
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    expected = dataset_of(tokenizer, tmp_path / "a.jsonl", [{**row, "images": [*PICTURES]}], image_folder=str(folder))[
        0
    ]
    for path in ("a.parquet", "saved"):
        dataset = ConversationDataset(tokenizer, str(tmp_path / path))  # finds the images without a key
        assert isinstance(dataset._rows[0]["images"][0]["bytes"], bytes)
        assert of_sample(dataset[0]) == of_sample(expected)
    options = {"split": "train", "validation_fraction": 0.01}
    hashes = {ConversationDataset(tokenizer, str(tmp_path / "saved"), **options).facts().content[""] for _ in range(2)}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"messages": [user("?"), ANSWER], "images": ["cat.png"]}, "0 places for the 1 images"),
        ({"messages": [user(MARK, MARK), ANSWER], "images": ["cat.png"]}, "2 places for the 1 images"),
        ({"messages": [user(MARK), ANSWER]}, "1 places for the 0 images"),
        ({"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "image_path": "cat.png"}, "1 of <image> for 0 images"),
        ({"prompt": "<image>?", "completion": "Pets.", "picture": "cat.png"}, "1 of <image> for 0 images"),
        ({"messages": [user({**MARK, "path": "cat.png", "max_pixels": 64}), ANSWER]}, "max_pixels=64.*set tokenizer.images"),
        ({"question": "<ref-object>?", "answer": "<bbox>", "image": "cat.png", "objects": {"bbox": [[1, 2, 3, 4]]}}, "objects=.*it would be lost"),
        ({"messages": [user({**MARK, "path": "no.png"}), ANSWER]}, "has no such file"),
        ({"messages": [user({**MARK, "path": "../cat.png"}), ANSWER]}, "not below dataset.image_folder"),
        ({"messages": [user({**MARK, "url": "https://a.b/cat.png"}), ANSWER]}, "nothing is downloaded"),
        ({"messages": [user({"type": "video", "path": "a.mp4"}), ANSWER]}, "only text and images are supported"),
        ({"messages": [user({"type": "audio", "audio": "a.wav"}), ANSWER]}, "only text and images are supported"),
        ({"messages": [user("?"), ANSWER], "videos": ["a.mp4"]}, "videos=.*it would be lost"),
        ({"messages": [user({**MARK, "path": "deep.png"}), ANSWER]}, "mode I;16"),
        ({"messages": [user("<|image_pad|>"), ANSWER]}, "special token"),
        ({"messages": [user("?"), {**ANSWER, "content": [{**MARK, "path": "cat.png"}]}]}, r"turn 1 \(assistant\): it has an image"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_by_line(tokenizer, folder, tmp_path, row, cause):
    dataset = dataset_of(tokenizer, tmp_path / "a.jsonl", [row], image_folder=str(folder))
    with pytest.raises(SampleError, match=rf"line 1 of .*a.jsonl: .*{cause}"):
        dataset[0]


def test_a_file_of_texts_with_one_image_later_names_the_key(tokenizer, folder, tmp_path):
    texts = [{"messages": [user("?"), ANSWER]}] * 300
    rows = [*texts, {"messages": [user({**MARK, "image": data_url(folder, "cat.png")}), ANSWER]}, *texts]
    dataset = dataset_of(tokenizer, tmp_path / "a.jsonl", rows)
    assert "image_inputs" not in dataset[0]
    with pytest.raises(SampleError, match=r"line 301 of .*set dataset.image_folder"):
        dataset[300]
