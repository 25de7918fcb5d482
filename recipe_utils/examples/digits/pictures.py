"""Questions about pictures of numbers: the digits of scikit-learn in a row, and a tokenizer with a processor of images.

A sample: a picture of 16 x 32 pixels, "What number is it?", "47". A third of the samples asks for the digits on two
pictures. The rows are a file of conversations beside a folder of images, as a user's own would be.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from recipe_utils.examples.build_once import build_once
from recipe_utils.examples.digits.samples import digits_dataset
from recipe_utils.examples.question_answers import check_split
from recipe_utils.files import write_atomically
from recipe_utils.text.conversations.file_datasets import ConversationDataset
from recipe_utils.text.conversations.tokenizer import FolderTokenizer

_SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|image_start|>", "<|image|>", "<|image_end|>", "<|video|>")
"""Behind the 256 bytes: ids 256 to 262, which the config of the model names."""
_CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- '<|image_start|><|image|><|image_end|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
_FILES = {
    "chat_template.jinja": _CHAT_TEMPLATE,
    "tokenizer_config.json": json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "pad_token": "<|end|>",
            "extra_special_tokens": {"image_token": "<|image|>", "video_token": "<|video|>"},
        }
    ),
    "processor_config.json": json.dumps({"processor_class": "Qwen2VLProcessor"}),
    # Patches of 4 x 4 pixels, of which 4 become a token: a digit has 4 tokens.
    "preprocessor_config.json": json.dumps(
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 65536},
        }
    ),
}
"""Files of the folder beside ``tokenizer.json``."""
_NUM_SAMPLES = {"train": 6000, "validation": 200}


def digit_pictures_tokenizer(path: str, max_seq_len: int | None = None) -> FolderTokenizer:
    """Returns a tokenizer of bytes for texts, with the processor of Qwen2-VL for images; writes its files into ``path``."""
    folder = Path(path)

    def build() -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in _SPECIAL_TOKENS])
        for name, content in _FILES.items():
            write_atomically(folder / name, content)
        write_atomically(folder / "tokenizer.json", tokenizer.to_str())

    build_once(folder / "tokenizer.json", build)
    return FolderTokenizer(path, max_seq_len)


def digit_pictures_dataset(tokenizer: FolderTokenizer, path: str, split: str = "train") -> ConversationDataset:
    """Returns a split of the questions, whose file ``path``/``split``.jsonl and pictures the first call writes.

    Pictures of the validation split have digits that the other one has not.
    """
    check_split(split)
    file = Path(path, f"{split}.jsonl")
    build_once(file, lambda: write_atomically(file, "".join(_rows(Path(path), split))))
    return ConversationDataset(tokenizer, str(file), image_folder=path)


def _rows(folder: Path, split: str) -> Iterator[str]:
    """Yields lines of conversations, and writes their pictures."""
    digits = digits_dataset("train" if split == "train" else "test")
    draw = np.random.default_rng(len(digits))
    (folder / split).mkdir(parents=True, exist_ok=True)
    for index in range(_NUM_SAMPLES[split]):
        content: list[dict[str, Any]] = []
        numbers = []
        num_pictures = 1 + (index % 3 == 0)
        for which in range(num_pictures):
            num_digits = draw.integers(1, 3) if num_pictures == 1 else 1
            parts = [digits[number] for number in draw.integers(len(digits), size=num_digits)]
            pixels = np.concatenate([part["image"][0] for part in parts], axis=1)
            name = f"{split}/{index}_{which}.png"
            Image.fromarray((pixels * 255).astype(np.uint8)).save(folder / name)
            content.append({"type": "image", "path": name})
            numbers.append("".join(str(part["label"]) for part in parts))
        question = "What number is it?" if len(numbers) == 1 else "Which digits are these?"
        content.append({"type": "text", "text": question})
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": " and ".join(numbers)}]
        yield json.dumps({"messages": messages}) + "\n"
