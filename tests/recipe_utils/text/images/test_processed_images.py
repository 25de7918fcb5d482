"""Tokens, targets and tensors of conversations with images, beside those of transformers' processors."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, ProcessorMixin

from recipe_utils.text.conversations.messages import Conversation
from recipe_utils.text.conversations.tokenizer import FolderTokenizer
from recipe_utils.update_steps.samples import SampleError
from tests.support.image_folders import FOLDERS, write_image_folder

CHAT = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image"}]},
    {"role": "assistant", "content": "A dog."},
]
ANSWERS = {1: "A cat.<|im_end|>", 3: "A dog.<|im_end|>"}


def image(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def conversation(**changes):
    return Conversation(**{"chat": CHAT, "weights": [0, 1, 0, 1], "images": [image(40, 24), image(16, 16)], **changes})


@pytest.fixture(scope="module", params=FOLDERS)
def tokenizer(request, tmp_path_factory):
    return FolderTokenizer(str(write_image_folder(tmp_path_factory.mktemp(request.param), request.param)))


def test_tokens_types_positions_and_pixels_are_transformers_own_and_targets_are_answers(tokenizer):
    tokens, turns, images = tokenizer.tokenize(conversation())
    text = tokenizer.tokenizer.apply_chat_template(CHAT, tokenize=False)
    own = {"text": [text], "images": [image(40, 24), image(16, 16)], "return_tensors": "pt"}
    expected = dict(tokenizer.images._processor(**own, add_special_tokens=False))
    config = AutoConfig.from_pretrained(tokenizer.tokenizer.name_or_path)
    with torch.device("meta"):
        count = getattr(AutoModelForImageTextToText.from_config(config).model, "get_rope_index", None)
    axes = np.empty((0, len(tokens))) if count is None else count(**expected)[0][:, 0]
    np.testing.assert_array_equal(images.positions, [np.arange(len(tokens)), *axes])
    del expected["attention_mask"]
    np.testing.assert_array_equal(expected.pop("input_ids")[0], tokens)
    for name, column in images.types.items():
        np.testing.assert_array_equal(expected.pop(name)[0], column)
    (pixels,) = images.pixels
    assert pixels.sizes == [(24, 40), (16, 16)]
    assert pixels.start == np.flatnonzero(images.identities)[0]
    assert expected.keys() == pixels.tensors.keys()
    for name, tensor in pixels.tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    assert {turn: tokenizer.decode(tokens[turns == turn], False) for turn in np.unique(turns[turns >= 0])} == ANSWERS


def test_a_processor_that_does_otherwise_than_its_parts_is_followed(tmp_path, monkeypatch):
    folder, call = str(write_image_folder(tmp_path, "qwen2_vl")), ProcessorMixin.__call__

    def brighter(*args, **options):
        made = call(*args, **options)
        return {**made, "pixel_values": made["pixel_values"] + 1}

    own = FolderTokenizer(folder).tokenize(conversation()).images.pixels[0].tensors["pixel_values"]
    monkeypatch.setattr(ProcessorMixin, "__call__", brighter)
    other = FolderTokenizer(folder).tokenize(conversation()).images.pixels[0].tensors["pixel_values"]
    assert torch.equal(other, own + 1)


def test_turns_of_a_conversation_have_the_images_up_to_them(tokenizer):
    for end, made in zip([2, 4], tokenizer.tokenize_turns(conversation(), [2, 4]), strict=True):
        alone = tokenizer.tokenize(conversation(chat=CHAT[:end], weights=[*[0] * (end - 1), 1]))
        for one, other in zip(made[:2], alone[:2], strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(made.images.identities, alone.images.identities)
        assert [len(each.sizes) for each in made.images.pixels] == [end // 2]
        assert tokenizer.decode(made.tokens[made.turns >= 0], False) == ANSWERS[end - 1]


def test_a_text_alone_has_the_columns_of_the_model_and_no_image(tokenizer):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    tokens, _, images = tokenizer.tokenize(Conversation(chat, [0, 1], images=()))
    np.testing.assert_array_equal(tokens, tokenizer.tokenize(Conversation(chat, [0, 1]))[0])
    assert not images.identities.any()
    assert not images.pixels
    assert (images.positions == np.arange(len(tokens))).all()
    assert not any(column.any() for column in images.types.values())


def test_equal_images_have_one_number_and_others_another(tokenizer):
    def number(*images):
        return min(tokenizer.tokenize(conversation(images=images)).images.identities)

    assert number(image(40, 24), image(16, 16)) == number(image(40, 24), image(16, 16))
    assert number(image(40, 24), image(16, 16)) != number(image(40, 24), image(16, 16, seed=1))
    assert number(image(40, 24), image(16, 16)) != number(image(16, 16), image(40, 24))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"images": [image(8, 8)]}, "it has 2 of .* for 1 images"),
        ({"chat": [CHAT[0], {"role": "assistant", "content": CHAT[2]["content"]}], "weights": [0, 1]}, r"turn 1 \(assistant\): .*image"),
    ],
)  # fmt: skip
def test_an_image_that_would_be_lost_or_trained_is_refused(tokenizer, changes, cause):
    with pytest.raises(SampleError, match=cause):
        tokenizer.tokenize(conversation(**changes))


def test_no_image_is_cut(tmp_path):
    folder = str(write_image_folder(tmp_path / "folder", "qwen2_vl"))
    whole = FolderTokenizer(folder).tokenize(conversation())
    last = np.flatnonzero(whole.images.identities)[-1]
    with pytest.raises(SampleError, match=rf"tokenizer.max_seq_len={last}: .*set it to at least {last + 2}"):
        FolderTokenizer(folder, max_seq_len=int(last)).tokenize(conversation())
    cut = FolderTokenizer(folder, max_seq_len=int(last) + 2).tokenize(conversation())
    np.testing.assert_array_equal(cut.tokens, whole.tokens[: last + 2])
    assert cut.images.positions.shape == (4, last + 2)
    image(40, 24).save(tmp_path / "a.png")
    with pytest.raises(SampleError, match=r"tokenizer.max_seq_len=12: it would cut an image, whose last token is 21"):
        FolderTokenizer(folder, max_seq_len=12).prompt_beside_image({"image": str(tmp_path / "a.png"), "text": "What?"})


def test_a_template_that_prints_no_image_is_named(tmp_path):
    folder = write_image_folder(tmp_path / "folder", "llava")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<image>", ""))
    with pytest.raises(SampleError, match="prints 0 of its 2 images"):
        FolderTokenizer(str(folder)).tokenize(conversation())


@pytest.mark.parametrize(
    ("file", "content", "cause"),
    [
        ("processor_config.json", '{"processor_class": "Idefics2Processor"}', "Idefics2Processor"),
        ("processor_config.json", '{"processor_class": "NoProcessor"}', "has no NoProcessor"),
        ("preprocessor_config.json", '{"image_processor_type": "NoImageProcessor"}', "cannot be made"),
        ("preprocessor_config.json", '{"image_processor_type": "Lfm2VlImageProcessor"}', "; pip install torchvision"),
    ],
)
def test_a_folder_whose_processor_cannot_be_used_is_named(tmp_path, file, content, cause):
    folder = write_image_folder(tmp_path / "folder", "llava")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer.path={folder}: .*{cause}"):
        _ = FolderTokenizer(str(folder)).images
