"""Tiny components for configs under test, and gradients computed another way."""

import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import sqlite3
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, get_worker_info
from torchtune import config
from torchtune.data import padded_collate_sft
from torchtune.datasets import PackedDataset
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.modules import MultiHeadAttention, TransformerCrossAttentionLayer
from torchtune.modules.model_fusion import DeepFusionModel, FusionLayer
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params

from recipe_utils.text.reader import TextReader
from recipe_utils.text.row_tensors import packed
from recipe_utils.text.trees import apart
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.samples import Facts

VOCAB_SIZE = 67
IGNORE = -100

MODEL = {
    "_component_": "torchtune.models.llama3_2.llama3_2",
    "vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 64,
    "scale_factor": 1,
}
UNTIED_MODEL = {
    **{key: value for key, value in MODEL.items() if key != "scale_factor"},
    "_component_": "torchtune.models.llama3.llama3",
}
DEEP_MODEL = {**MODEL, "num_layers": 4}
DEEP_UNTIED_MODEL = {**UNTIED_MODEL, "num_layers": 4}
_WIDE = {"num_kv_heads": 4, "embed_dim": 256, "intermediate_dim": 256}
WIDE_MODEL = {**MODEL, **_WIDE}
WIDE_UNTIED_MODEL = {**UNTIED_MODEL, **_WIDE}
"""Their weights fall into whole NF4 blocks on up to 4 ranks."""
_OF_TEACHER = {"num_layers": 5, "embed_dim": 48, "intermediate_dim": 64}
TEACHER_MODEL = {**MODEL, **_OF_TEACHER}
UNTIED_TEACHER_MODEL = {**UNTIED_MODEL, **_OF_TEACHER, "vocab_size": VOCAB_SIZE + 13}
"""A wider, deeper model, cut at other layers, with tokens that the others do not have."""

_OF_GEMMA2 = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
GEMMA2_MODEL = {**UNTIED_MODEL, **_OF_GEMMA2, "_component_": "torchtune.models.gemma2.gemma2"}
"""A model with another attention class, a sliding window and tied embeddings."""


def adapted(sizes, **changes):
    """Returns the same model with LoRA on all its linear layers except the output."""
    package, builder = sizes["_component_"].rsplit(".", 1)
    return {
        **sizes,
        "_component_": f"{package}.lora_{builder}",
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": 4,
        "lora_alpha": 6,
        **changes,
    }


def adapted_in_one_layer(**sizes):
    """Returns the builder of a model of which only the first layer has LoRA."""
    model, adapted = (llama3_2(**sizes), lora_llama3_2(["q_proj"], lora_rank=2, lora_alpha=4, **sizes))
    model.layers[0] = adapted.layers[0]
    return model


def base_of(sizes):
    """Returns the model without the adapters of :func:`adapted`."""
    plain = {key: value for key, value in sizes.items() if key not in ADAPTER_KEYS}
    return {**plain, "_component_": sizes["_component_"].replace(".lora_", ".")}


ADAPTER_KEYS = {
    "lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output", "lora_rank", "lora_alpha", "lora_dropout",
    "use_dora", "quantize_base",
}  # fmt: skip


class TinyTokenizer:
    """Tokenizer of samples that contain tokens already; each letter of a question is a token."""

    pad_id, eos_id = 0, 1
    stop_tokens = (eos_id,)

    def __init__(self, max_seq_len):
        self.max_seq_len = max_seq_len

    def __call__(self, sample, inference):
        assert inference
        text = "".join(message.text_content for message in sample["messages"])
        return {"tokens": [2 + ord(letter) % (VOCAB_SIZE - 2) for letter in text]}

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def tiny_tokenizer(max_seq_len=64):
    return TinyTokenizer(max_seq_len)


class Samples(Dataset[dict[str, Any]]):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class WithFacts(Samples):
    def __init__(self, samples, facts):
        super().__init__(samples)
        self._facts = facts

    def facts(self):
        return self._facts


class DrawingSamples(Samples):
    def __getitem__(self, index):
        shift = int(torch.randint(9, ())) + random.randrange(9) + np.random.randint(9)
        tokens = [(token + shift) % 60 for token in super().__getitem__(index)["tokens"]]
        return {"tokens": tokens, "labels": tokens}


def drawing_dataset(_, num_samples):
    """Returns samples that differ at each read."""
    return DrawingSamples(make_samples(num_samples))


def endless_dataset(_):
    """Returns a stream, which has no length."""
    yield from itertools.count()


class KillsItsWorker(Samples):
    """Ends the DataLoader worker that loads one of some samples; with a folder, once for each sample."""

    def __init__(self, samples, indices, folder, how="SIGKILL"):
        super().__init__(samples)
        self.indices, self.folder, self.how = indices, folder, how

    def __getitem__(self, index):
        if index in self.indices and get_worker_info() is not None and self._is_due(index):
            if isinstance(self.how, int):
                os._exit(self.how)
            os.kill(os.getpid(), signal.Signals[self.how])
        return super().__getitem__(index)

    def _is_due(self, index):
        if self.folder is None:
            return True
        mark = self.folder / f"asked_for_{index}"
        is_due = not mark.exists()
        mark.touch()
        return is_due


def killing_dataset(tokenizer, num_samples, index, folder):
    return KillsItsWorker(make_samples(num_samples), [index], Path(folder) if folder else None)


class WaitsBeforeStep(Samples):
    """Does not return samples of an update step, from 0, and of later ones, until a file exists."""

    def __init__(self, samples, step, file):
        super().__init__(samples)
        self.step, self.file = step, file

    def facts(self):
        return Facts(takes_place=True)

    def __getitem__(self, index):
        while index.step >= self.step and not self.file.exists():
            time.sleep(0.01)
        return super().__getitem__(index.item)


def waiting_dataset(tokenizer, num_samples, step, file):
    return WaitsBeforeStep(make_samples(num_samples), step, Path(file))


def read(samples, **keys):
    """Returns samples as a collator's ``prepare`` does, in the order of an update step."""
    places = (StepIndex(i, position=i) for i in range(len(samples)))
    return [
        TextReader(IGNORE, **keys).prepare(s, f"sample {at} of dataset", at)
        for s, at in zip(samples, places, strict=True)
    ]


def packed_row(samples, **options):
    return laid_out(read(samples), **options)


def laid_out(samples, reader=None, **options):
    """Returns one packed row of prepared samples."""
    return packed(apart([sample.without_padding() for sample in samples]), reader or TextReader(IGNORE), **options)


def make_samples(num_samples, num_without_targets=0, mask_prompts=True, seed=0, num_common=0, has_weights=False):
    """Returns samples of 2 to 40 tokens with very uneven numbers of targets.

    The last ``num_without_targets`` have no target at all. Without ``mask_prompts`` the labels of the
    other ones are all their tokens, the first included. All begin with ``num_common`` further tokens.
    With ``has_weights`` labels have weights, but in every third sample.
    """
    rng = random.Random(seed)
    samples = []
    for i in range(num_samples):
        length = rng.choice([2, 3, 5, 9, 17, 40])
        tokens = [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]
        masked = rng.randrange(1, length) if mask_prompts else 0
        if i >= num_samples - num_without_targets:
            masked = length
        labels = [IGNORE] * (num_common + masked) + tokens[masked:]
        samples.append({"tokens": [*range(1, num_common + 1), *tokens], "labels": labels})
        if has_weights and i % 3:
            drawn = random.Random(i)
            samples[-1]["weights"] = [drawn.choice([0, 0.1, 0.5, 1, 3]) for _ in labels]
    return samples


def tiny_dataset(
    tokenizer,
    num_samples,
    num_without_targets=0,
    mask_prompts=True,
    packed=False,
    seed=0,
    replace=None,
    num_common=0,
    has_weights=False,
):
    """Returns samples. ``replace`` puts a sample of the test's own at an index; with None as tokens it raises."""
    samples = make_samples(num_samples, num_without_targets, mask_prompts, seed, num_common, has_weights)
    for index, sample in (replace or {}).items():
        samples[int(index)] = dict(sample)
    dataset = Samples(samples)
    return PackedDataset(dataset, max_seq_len=64) if packed else dataset


def file_dataset(tokenizer, path):
    """Returns the samples of a JSON file, with a hash of its bytes."""
    content = Path(path).read_bytes()
    return WithFacts(json.loads(content), Facts(content={"": hashlib.sha256(content).hexdigest()}))


class SqliteSamples(Samples):
    """Opens its file at the first read; a connection of SQLite works in one thread of one process."""

    def __init__(self, path, num_samples):
        self.path, self.samples, self.connection = path, range(num_samples), None

    def __getitem__(self, index):
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)
        (text,) = self.connection.execute("SELECT text FROM samples WHERE id = ?", (index,)).fetchone()
        return json.loads(text)


def sqlite_dataset(_, path, num_samples):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS samples (id INTEGER PRIMARY KEY, text TEXT)")
        rows = enumerate(map(json.dumps, make_samples(num_samples)))
        connection.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?)", rows)
        connection.commit()
    return SqliteSamples(path, num_samples)


def make_trees(num_samples, seed=0):
    """Returns samples of sequences: turns of a conversation, with or without thinking, and answers to a prompt."""
    rng = random.Random(seed)

    def some(least, most):
        return [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(least, most))]

    samples = []
    for i in range(num_samples):
        sequences, history, answer = [], some(2, 6), some(1, 2)
        for _ in range(rng.randint(1, 4)):
            if i % 3:
                history = history + some(1, 4)
                tokens = history + (added := some(2, 5) + some(1, 4))
                labels = [IGNORE] * len(history) + added
                history = tokens if rng.random() < 0.3 else tokens[: len(history)] + added[-2:]
            else:  # answers begin alike
                tokens = history + answer + some(1, 6)
                labels = [IGNORE] * len(history) + tokens[len(history) :]
            sequences.append({"tokens": tokens, "labels": labels})
        sequences.append({"tokens": history, "labels": [IGNORE] * len(history)})
        samples.append({"sequences": sequences})
    return samples


def tiny_tree_dataset(_, num_samples):
    return WithFacts(make_trees(num_samples), Facts(has_sequences=True))


_of_the_test: list[Any] = []


@contextmanager
def samples_of_the_test(samples):
    """Makes ``tiny.samples_dataset`` one of these, whatever they are, in this process."""
    _of_the_test[:] = samples
    try:
        yield
    finally:
        _of_the_test.clear()


def samples_dataset(tokenizer):
    return Samples(list(_of_the_test))


PAIR_KINDS = ("masked", "multi_turn", "train_on_input", "nothing_common", "alike_beginnings")


def make_pairs(num_pairs, kind="masked", seed=0):
    """Returns pairs of very uneven length, by torchtune's keys.

    What both sides share: a prompt without targets (``masked``); with targets in it (``multi_turn``); all of
    it targets (``train_on_input``); nothing; or a masked prompt and the answers' beginnings.
    """
    rng = random.Random(seed)

    def draw(length):
        return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]

    pairs = []
    for _ in range(num_pairs):
        prompt = draw(rng.choice([1, 2, 5, 11, 20]))
        labels = [IGNORE] * len(prompt)
        if kind == "train_on_input":
            labels = list(prompt)
        elif kind == "multi_turn":
            labels = [t if rng.random() < 0.5 else IGNORE for t in prompt]
        alike = draw(rng.choice([1, 3, 8])) if kind == "alike_beginnings" else []
        pair = {}
        for first, side in enumerate(("chosen", "rejected"), start=1):
            answer = [*alike, first, *draw(rng.choice([1, 2, 6, 17, 30]))]
            own = prompt if kind != "nothing_common" else [first, *draw(len(prompt))]
            of_own = labels if kind != "nothing_common" else [IGNORE] * len(own)
            pair[f"{side}_input_ids"] = own + answer
            pair[f"{side}_labels"] = of_own + answer
        pairs.append(pair)
    return pairs


def without_shared_turns(pair):
    """Returns a pair whose common first turns, but the last turn with targets of a side, have no targets."""
    turns = []
    for side in ("chosen", "rejected"):
        tokens = [*zip(pair[f"{side}_input_ids"], pair[f"{side}_labels"], strict=True)]
        turns.append([[*of] for _, of in itertools.groupby(tokens, lambda each: each[1] != IGNORE)])
    num_shared = 0
    for one, other in zip(*([each[:-1] for each in turns]), strict=False):
        if one != other:
            break
        num_shared += len(one)
    masked = {
        f"{s}_labels": [IGNORE] * num_shared + [*pair[f"{s}_labels"]][num_shared:] for s in ("chosen", "rejected")
    }
    return pair | masked


def tiny_pair_dataset(tokenizer, num_pairs, kind="masked", seed=0):
    return Samples(make_pairs(num_pairs, kind, seed))


def pairs_some_of_which_teach_nothing(tokenizer, num_pairs, only_live=False, dead_first=False):
    """Returns pairs, every third with equal sides or no target on one."""
    pairs = make_pairs(num_pairs, "alike_beginnings")
    dead = []
    for i in range(1, num_pairs, 3):
        pair = pairs[i]
        if i % 2:
            pair = {**pair, "rejected_labels": [IGNORE] * len(pair["rejected_labels"])}
        else:
            pair = {key: pair[key.replace("rejected", "chosen")] for key in pair}
        dead.append(i)
        pairs[i] = pair
    live = [pair for i, pair in enumerate(pairs) if i not in dead]
    if only_live:
        return Samples(live)
    return Samples([*(pairs[i] for i in dead), *live] if dead_first else pairs)


def tiny_image_dataset(tokenizer, num_samples):
    """Returns samples with one made-up image of 3 features in 4 patches each."""
    generator = torch.Generator().manual_seed(0)
    samples = make_samples(num_samples)
    return Samples([{**s, "image": torch.randn(4, 3, generator=generator)} for s in samples])


def collate_images(batch, padding_idx, ignore_idx):
    """Custom ``collate_fn`` whose batch has more than tokens and labels."""
    collated = padded_collate_sft(batch, padding_idx, ignore_idx)
    images = torch.stack([torch.as_tensor(sample["image"]) for sample in batch])
    return {**collated, "encoder_input": {"images": images}}


def collate_joined(batch, padding_idx, ignore_idx):
    """Custom ``collate_fn`` that makes one row of all samples."""
    collated = padded_collate_sft(batch, padding_idx, ignore_idx)
    return {key: rows.reshape(1, -1) for key, rows in collated.items()}


class ImageEncoder(nn.Linear):
    def forward(self, images):
        return super().forward(images.to(self.weight.dtype))


def tiny_fusion_model():
    """Returns a decoder that attends to images, built from the parts of torchtune's vision models."""
    decoder = tiny_model(UNTIED_MODEL)
    dim, heads = UNTIED_MODEL["embed_dim"], UNTIED_MODEL["num_heads"]
    projections = {f"{name}_proj": nn.Linear(dim, dim, bias=False) for name in ("q", "k", "v", "output")}
    sizes = {"embed_dim": dim, "num_heads": heads, "num_kv_heads": heads, "head_dim": dim // heads}
    attention = MultiHeadAttention(**sizes, **projections, is_causal=False)
    cross_attention = TransformerCrossAttentionLayer(attn=attention, mlp=nn.Linear(dim, dim))
    decoder.layers[1] = FusionLayer(layer=decoder.layers[1], fusion_layer=cross_attention)
    return DeepFusionModel(
        decoder=decoder,
        encoder=ImageEncoder(3, dim),
        encoder_trainable=True,
        decoder_trainable=True,
        fusion_trainable=True,
    )


def adapted_fusion_model():
    """Returns :func:`tiny_fusion_model` with LoRA in a layer whose state dict has other names than its modules."""
    model = tiny_fusion_model()
    dim = UNTIED_MODEL["embed_dim"]
    model.decoder.layers[1].layer.attn.q_proj = LoRALinear(dim, dim, rank=2, alpha=4)
    return model


class RecordingSGD(torch.optim.SGD):
    """Keeps the full gradients that each step sees in :attr:`recorded`."""

    recorded: list[list[Tensor]] = []  # noqa: RUF012

    def step(self, closure=None):
        gradients, has_any = [], any(p.grad is not None for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None and has_any:  # of an output layer beside a head
                    grad = torch.zeros(parameter.shape)
                full = grad.full_tensor() if isinstance(grad, DTensor) else grad
                gradients.append(full.detach().clone())
        RecordingSGD.recorded.append(gradients)
        super().step(closure)


class MeanOverPositions(nn.CrossEntropyLoss):
    """Divides by all positions, also those without a target."""

    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum") / labels.numel()


class UnsavableSGD(torch.optim.SGD):
    """Optimizer whose state has a value that is neither tensor nor plain, from a step on."""

    num_steps = 0

    def __init__(self, params, lr, first_step=4):
        super().__init__(params, lr)
        self.first_step = first_step

    def step(self, closure=None):
        super().step(closure)
        self.num_steps += 1
        if self.num_steps < self.first_step:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = object()


@contextmanager
def float64_throughout():
    """torchtune's norms and RoPE compute in fp32 whatever the model's precision; here in float64."""
    to_float32 = Tensor.float
    Tensor.float = lambda self: self if self.dtype == torch.float64 else to_float32(self)
    try:
        yield
    finally:
        Tensor.float = to_float32


def tiny_model(sizes=MODEL, seed=0):
    """Returns a model of ``MODEL`` or ``UNTIED_MODEL`` with weights of its own."""
    torch.manual_seed(seed)
    model = config.instantiate(OmegaConf.create(sizes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return model


def on_meta(sizes=MODEL, **settings):
    """Returns a model without weights, as recipes build it."""
    from recipe_utils.models.construct import build_on_meta
    from recipe_utils.models.settings import ModelSettings

    make = partial(config.instantiate, OmegaConf.create(sizes))
    return build_on_meta(make, ModelSettings(**settings))


def adapted_model(sizes, seed=1):
    """Returns a model of :func:`adapted` on :func:`tiny_model`, frozen, with adapters that change it."""
    model = config.instantiate(OmegaConf.create(sizes))
    model.load_state_dict(tiny_model(base_of(sizes)).state_dict(), strict=False)
    adapters = get_adapter_params(model)
    set_trainable_params(model, adapters)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapters.items():
        middle = 1.0 if "magnitude" in name else 0.0
        nn.init.normal_(parameter, mean=middle, std=0.2, generator=generator)
    return model


def merged_model(sizes):
    """Returns the plain model in float64 that computes what :func:`adapted_model` does."""
    adapted, plain = adapted_model(sizes).double(), tiny_model(base_of(sizes)).double()
    for name, layer in adapted.named_modules():
        if hasattr(layer, "lora_a"):
            product = layer.lora_b.weight @ layer.lora_a.weight
            weight = layer.weight + sizes["lora_alpha"] / sizes["lora_rank"] * product
            if hasattr(layer, "magnitude"):
                weight = weight * (layer.magnitude / weight.norm(dim=1))[:, None]
            plain.get_submodule(name).weight = nn.Parameter(weight.detach())
    return plain


class TinyImages(Dataset[dict[str, Any]]):
    """Smooth images of ``num_classes`` kinds, each with noise of its own."""

    def __init__(self, num_images, num_classes):
        generator = torch.Generator().manual_seed(7)
        kinds = torch.randn(num_classes, 1, 4, 4, generator=generator)
        self.labels = torch.randint(num_classes, (num_images,), generator=generator)
        noise = 0.3 * torch.randn(num_images, 1, 16, 16, generator=generator)
        smooth = F.interpolate(kinds[self.labels], size=16, mode="bilinear")
        self.images = (smooth + noise).sigmoid()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index].numpy(), "label": int(self.labels[index])}


def tiny_images(num_images=40, num_classes=4):
    """Returns images of 16 x 16 pixels in one channel, with labels."""
    return TinyImages(num_images, num_classes)


def unlabeled_images(num_images=8, **values):
    """Returns images with ``values``, such as a label that is no class, or with none."""
    return Samples([{"image": image.numpy(), **values} for image in TinyImages(num_images, 4).images])


def normalized_by_batch(**sizes):
    """Returns a vision transformer whose last norm couples all tokens of a microbatch."""
    from recipe_utils.dinov3.backbone import dinov3_vit

    model = dinov3_vit(**sizes)
    model.norm = nn.BatchNorm1d(sizes["embed_dim"])
    return model
