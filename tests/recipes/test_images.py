"""Images beside text, through the recipe: the gradient of every parameter is that of single samples, in any layout.

The oracle is transformers' own forward, one sample at a time, in float64. In the second update step one of two ranks has
no image. Tower, projector and text are trained.
"""

import json
import random
import re
import sys
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import policies
import pytest
import torch
import torch.nn.functional as F
from arrays import LAYOUTS
from big_batch import TOLERANCE, error, metrics_and_gradients
from distributed_runs import run_distributed
from image_folders import CHATS, answer, image_keys, model_folder, turn, write_chats
from omegaconf import OmegaConf
from PIL import Image
from recipe_runs import DPO, KD, POLICY, SFT, changed_recipe, refusal, run_recipe, slow, tiny_config, writing_to
from safetensors.torch import load_file
from tiny_transformers import DoublePrecision, gradients_in_float64
from torch import nn
from torchtune.training import set_default_dtype
from transformers import AutoModelForImageTextToText

from recipe_utils.check_gradient import __main__ as check_gradient
from recipe_utils.files import CheckpointError
from recipe_utils.policy.rollouts import RolloutDataset
from recipe_utils.preference.pair_files import PairDataset
from recipe_utils.show_data.__main__ import report
from recipe_utils.text.conversations.file_datasets import ConversationDataset
from recipe_utils.text.conversations.tokenizer import FolderTokenizer

ALL_PARTS = ["text", "projector", "tower"]
MARK = {"type": "image"}
SAMPLES_PER_STEP = 4
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder of chats with their images, and of a model of each kind that a test needs."""
    return write_chats(tmp_path_factory.mktemp("images"))


class Row(NamedTuple):
    """One training whose gradients are compared."""

    kind: str
    plan: str = "packed"
    layout: str = "one"
    trains: list[str] = ALL_PARTS
    changes: dict = {}  # noqa: RUF012


def config_of(row, folder, out):
    return writing_to(
        out,
        tiny_config(
            str(out),
            **image_keys(folder, row.kind, row.trains),
            shuffle=False,
            microbatching=row.plan,
            batch_size=2,
            global_batch_size=SAMPLES_PER_STEP,
            gradient_accumulation_steps=...,
            **({"max_tokens_per_microbatch": 150} if row.plan != "in_order" else {}),
            **LAYOUTS[row.layout][1],
            **row.changes,
        ),
    )


def model_in_float64(path):
    """Returns the model of a folder, buffers in float64, too."""
    saved = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64)
    model = AutoModelForImageTextToText.from_config(saved.config)
    model.load_state_dict(saved.state_dict())
    return model


def logits_of(model, tokens, images):
    """Returns the logits [t, v] of one sample by transformers' own forward, which computes positions itself."""
    inputs = {name: torch.from_numpy(column)[None] for name, column in images.types.items()}
    for pixels in images.pixels:
        inputs |= {n: t.double() if t.is_floating_point() else t for n, t in pixels.tensors.items()}
    return model(input_ids=torch.as_tensor(tokens)[None], **inputs, use_cache=False).logits[0]


def single_samples(folder, row):
    """Returns the gradients of each update step, by transformers' own forward of one sample at a time."""
    path = model_folder(folder, row.kind)
    dataset = ConversationDataset(FolderTokenizer(path), str(folder / "chats.jsonl"), image_folder=str(folder))
    with set_default_dtype(torch.float64), DoublePrecision():
        model, steps = model_in_float64(path), []
        for first in range(0, len(CHATS), SAMPLES_PER_STEP):
            samples = [dataset[index] for index in range(first, first + SAMPLES_PER_STEP)]
            num_targets = sum(int((np.array(sample["labels"]) >= 0).sum()) for sample in samples)
            for sample in samples:
                logits = logits_of(model, sample["tokens"], sample["image_inputs"])[:-1]
                (F.cross_entropy(logits, torch.tensor(sample["labels"][1:]), reduction="sum") / num_targets).backward()
            # A parameter that no sample of the update step reaches has a gradient of zero.
            steps.append({name: (0 * p if p.grad is None else p.grad) for name, p in model.named_parameters()})
            model.zero_grad()
    return steps


def gradients_of_rows(folder, rows, out):
    """Returns the gradients of rows; all of them run on the same ranks."""
    return [gradients_in_float64(config_of(row, folder, out / str(number))) for number, row in enumerate(rows)]


FAST = [
    Row("qwen2_vl"),
    Row("gemma3", "least_padding"),
    Row("qwen2_vl", layout="fsdp-2"),
    Row("idefics3", "in_order", "fsdp-2"),
    Row("llava", layout="fsdp-2", trains=["tower"]),  # a frozen text, which all ranks gather in the backward
]
ROWS = [
    Row("llava"), Row("gemma3"), Row("idefics3"), Row("llava", "least_padding"), Row("idefics3", "in_order"),
    Row("qwen2_vl", changes={"enable_activation_checkpointing": True}),
    Row("qwen2_vl", trains=["text", "projector"]), Row("qwen2_vl", trains=["projector"]), Row("llava", trains=["tower"]),
    Row("qwen2_vl", "least_padding", "fsdp-2"), Row("gemma3", layout="fsdp-2"), Row("llava", layout="fsdp-2"),
    Row("idefics3", layout="fsdp-2", trains=["text", "projector"]),
    Row("qwen2_vl", layout="fsdp-2", trains=["projector"], changes={"custom_sharded_layers": ["model.model.language_model.embed_tokens"]}),
    Row("gemma3", "in_order", "hsdp-2x2"), Row("qwen2_vl", "packed", "fsdp-4"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "world_size"),
    [
        (FAST[:2], 1),
        (FAST[2:], 2),
        slow([row for row in ROWS if row.layout == "one"], 1),
        slow([row for row in ROWS if row.layout == "fsdp-2"], 2),
        slow([row for row in ROWS if LAYOUTS[row.layout][0] == 4], 4),
    ],
)
def test_gradients_are_those_of_single_samples(folder, tmp_path, rows, world_size):
    for row in rows:
        model_folder(folder, row.kind)
    run = gradients_of_rows
    on_ranks = (
        [run(folder, rows, tmp_path)] if world_size == 1 else run_distributed(run, world_size, folder, rows, tmp_path)
    )
    for number, row in enumerate(rows):
        expected = single_samples(folder, row)
        for computed in on_ranks:
            assert len(computed[number]) == len(CHATS) // SAMPLES_PER_STEP
            for step, reference in zip(computed[number], expected, strict=True):
                of_row = {f"model.{name}": gradient for name, gradient in reference.items()}
                assert step.keys() <= of_row.keys()
                assert error(step, {name: of_row[name] for name in step}) < TOLERANCE, row
        has_tower = any("vis" in name for name in on_ranks[0][number][0])
        assert has_tower == ("tower" in row.trains or (row.kind == "qwen2_vl" and "projector" in row.trains)), row


LR = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01}}


def metrics_of(config, recipe=SFT):
    """Returns what a training logs, without times."""
    kept = ("loss", "grad_norm", "num_tokens", "lr")
    return [{name: line[name] for name in kept if name in line} for line in run_recipe(config, recipe)]


@pytest.mark.parametrize("kind", ["qwen2_vl", slow("gemma3"), slow("idefics3"), slow("llava")])
def test_a_resume_is_bitwise_and_the_export_opens_with_its_processor(folder, tmp_path, kind):
    row = Row(kind, changes={**LR, "epochs": 2, "save_every_n_steps": 1})
    whole = metrics_of(config_of(row, folder, tmp_path / "whole"))
    stopped = config_of(row, folder, tmp_path / "stopped")
    first = metrics_of({**stopped, "epochs": 1})
    rest = metrics_of({**stopped, "resume_from_checkpoint": True})
    assert [*first, *rest] == whole
    # Weights, and all other files of the folder.
    exported, given = tmp_path / "whole" / "epoch_1", Path(model_folder(folder, kind))
    model = AutoModelForImageTextToText.from_pretrained(exported)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "stopped" / "epoch_1")
    before = AutoModelForImageTextToText.from_pretrained(given)
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before.get_parameter(name))]
    assert any("vis" in name for name in moved)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    for name in (
        "preprocessor_config.json",
        "processor_config.json",
        "chat_template.jinja",
        "tokenizer.json",
        "config.json",
    ):
        assert (exported / name).read_bytes() == (given / name).read_bytes(), name
    assert FolderTokenizer(str(exported)).images.settings == FolderTokenizer(str(given)).images.settings


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3", "llava", "idefics3"])
def test_packed_rows_have_the_losses_of_padded_ones_in_bf16(folder, tmp_path, kind, device):
    """On a GPU the kernel of packed rows is another one, and is compared beside images when the recipe starts."""
    losses = []
    for plan in ("packed", "least_padding"):
        config = config_of(Row(kind, plan, changes=LR), folder, tmp_path / plan)
        lines = metrics_of({**config, "device": device, "dtype": "bf16", "weights_dtype": "fp32"})
        losses.append([line["loss"] for line in lines])
    assert len(losses[0]) == len(CHATS) // SAMPLES_PER_STEP
    assert losses[0] == pytest.approx(losses[1], rel=2**-7)  # an ulp of bf16


def test_adapters_are_in_the_text_alone(folder, tmp_path):
    row = Row("qwen2_vl", changes=LR)
    config = config_of(row, folder, tmp_path)
    config["model"] = {
        "_component_": "recipe_utils.models.lora_causal_lm",
        "path": config["model"]["path"],
        "images": True,
        "r": 2,
    }
    first, *_, last = metrics_of(config)
    assert last["loss"] != first["loss"]
    names = {
        name.split(".lora_")[0] for name in load_file(tmp_path / "epoch_0" / "adapter" / "adapter_model.safetensors")
    }
    assert names
    assert not any("visual" in name for name in names)
    from peft import PeftModel

    base = AutoModelForImageTextToText.from_pretrained(config["model"]["path"])
    assert PeftModel.from_pretrained(base, tmp_path / "epoch_0" / "adapter")


def test_data_with_images_needs_a_model_that_takes_them(folder, tmp_path):
    config = config_of(Row("qwen2_vl"), folder, tmp_path)
    del config["model"]["images"], config["model"]["trains"]
    assert "set model.images=True" in refusal(config)


def test_changed_images_are_noticed_by_a_resume(folder, tmp_path):
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in folder.glob("*.*"):
        (copied / path.name).write_bytes(path.read_bytes())
    changes = {**LR, "epochs": 2, "save_every_n_steps": 1}
    config = config_of(Row("qwen2_vl", changes=changes), folder, tmp_path / "out")
    config["dataset"] |= {"path": str(copied / "chats.jsonl"), "image_folder": str(copied)}
    run_recipe({**config, "epochs": 1})
    Image.open(copied / "cat.png").rotate(180).save(copied / "cat.png")
    with pytest.raises(CheckpointError, match="hash_of_samples"):
        run_recipe({**config, "resume_from_checkpoint": True})


def test_an_answer_to_a_prompt_with_an_image_is_that_of_transformers(folder, tmp_path):
    prompts = [
        {"image": str(folder / "cat.png"), "text": "What?"},
        "Hello",
        {"image": str(folder / "fox.png"), "text": "And?"},
    ]
    sampled = {"sample_prompts": prompts, "sample_every_n_steps": 2, "sample_max_new_tokens": 5}
    config = config_of(Row("qwen2_vl", changes={**LR, **sampled}), folder, tmp_path)
    run_recipe(config)
    answers = [json.loads(line)["answer"] for line in (tmp_path / "logs" / "samples.jsonl").read_text().splitlines()]
    tokenizer = FolderTokenizer(str(tmp_path / "epoch_0"))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "epoch_0")
    for prompt, answer_text in zip(prompts, answers[-3:], strict=True):
        made = tokenizer.prompt_beside_image(prompt)
        inputs = {"input_ids": torch.from_numpy(made.tokens)[None]}
        inputs |= {name: torch.from_numpy(column)[None] for name, column in made.images.types.items()}
        for pixels in made.images.pixels:
            inputs |= pixels.tensors
        generated = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, len(made.tokens) :]
        text = tokenizer.decode([token for token in generated.tolist() if token not in tokenizer.stop_tokens])
        assert answer_text == text


def test_the_image_of_a_pair_is_computed_once(folder, tmp_path):
    """The oracle is transformers' own forward of each side: DPO's loss and gradients, with the model at the start."""
    path = model_folder(folder, "qwen2_vl")
    rows = [
        {"prompt": [turn("cat", "What?")], "chosen": [answer("A cat.")], "rejected": [answer("A dog")]},
        {"prompt": [turn("Hello")], "chosen": [answer("Yes?")], "rejected": [answer("No")]},
        {"prompt": [turn("Look: ", "fox", "dog")], "chosen": [answer("Two")], "rejected": [answer("One, I think")]},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(Row("qwen2_vl"), folder, tmp_path)
    config |= {
        "dataset": {
            "_component_": "recipe_utils.preference.pair_dataset",
            "path": str(tmp_path / "pairs.jsonl"),
            "image_folder": str(folder),
        },
        "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.3},
        "global_batch_size": 3,
        "max_tokens_per_microbatch": 500,
    }
    (computed,) = gradients_in_float64(config, DPO)
    dataset = PairDataset(FolderTokenizer(path), str(tmp_path / "pairs.jsonl"), image_folder=str(folder))
    with set_default_dtype(torch.float64), DoublePrecision():
        model = model_in_float64(path)
        for index in range(3):
            pair, log_probs = dataset[index], []
            for side in ("chosen", "rejected"):
                logits = logits_of(model, pair[f"{side}_input_ids"], pair[f"{side}_image_inputs"])[:-1]
                labels = torch.tensor(pair[f"{side}_labels"][1:])
                log_probs.append(-F.cross_entropy(logits, labels, reduction="sum"))
            margin = 0.3 * (log_probs[0] - log_probs[1] - (log_probs[0] - log_probs[1]).detach())
            (-F.logsigmoid(margin) / 3).backward()
        expected = {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert error(computed, expected) < TOLERANCE


def test_samples_are_printed_with_their_images(folder, tmp_path):
    lines = "\n".join(report(SFT, OmegaConf.create(config_of(Row("qwen2_vl"), folder, tmp_path)), 4))
    assert "<|vision_start|>[image 1: 24x40, 15 tokens]<|vision_end|>What?" in lines
    assert "And <|vision_start|>[image 2: 24x16, " in lines
    assert "⟦A dog, I think.<|im_end|>⟧" in lines
    tiles = "\n".join(report(SFT, OmegaConf.create(config_of(Row("idefics3"), folder, tmp_path / "tiles")), 4))
    assert re.search(r"<row_1_col_1>\[image 1: \d+ tokens\]", tiles)
    rollouts = rollouts_config(folder, tmp_path / "rollouts", OF_ANSWERS, Row("qwen2_vl"))
    lines = "\n".join(report(POLICY, OmegaConf.create(rollouts), 3))
    assert "[image 1: 24x40, 15 tokens]<|vision_end|>What?<|im_end|>" in lines
    assert "Further: <|vision_start|>[image 2: 15 tokens]" in lines  # of two answers, whose images are not shared


def test_a_teacher_computes_images_too(folder, tmp_path):
    """The gradient of samples in a packed row is that of samples each in a row of its own."""
    computed = []
    for plan in ("packed", "in_order"):
        config = config_of(Row("qwen2_vl", plan), folder, tmp_path / plan)
        config |= {"batch_size": 1} if plan == "in_order" else {"max_tokens_per_microbatch": 500}
        model, checkpointer = config["model"], config["checkpointer"]
        config |= {"teacher_model": model, "teacher_checkpointer": checkpointer, "kd_ratio": 0.5}
        config["kd_loss"] = {"_component_": "recipe_utils.distillation.LinearDistillationLoss"}
        computed.append(gradients_in_float64(config, KD))
    assert len(computed[0]) == 2
    for packed, alone in zip(*computed, strict=True):
        assert error(packed, alone) < TOLERANCE


# ---- Rollouts ------------------------------------------------------------------------------------

AGENT = [turn("cat", "?"), answer("Look"), turn("Further: ", "cow")]
GROUPS = [
    ([turn("cat", "What?")], {"A cat.": 1, "A dog": 0, "Cat": 0.25}),
    ([turn("Hello")], {"Yes?": 0, "No": 1}),  # one of two ranks has no image
    (AGENT, {"Cow.": 1, "A cat": 0}),
    ([turn("Look: ", "fox", "dog")], {"Two": 1, "One, I think": 0.5}),
    ([turn("fox", "?")], {"Fox": 1, "A fox": 1}),  # no advantage, and no forward without a KL
    ([turn("Hi")], {"Ho": 0, "Yes": 1}),
]
GROUPS_PER_STEP, RATE = 2, 0.05
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
WITH_KL = {"kind": "clipped", "normaliser": "answers", "old": "start", "kl": "k2", "kl_weight": 0.3, **CLIPS}
OF_ANSWERS = {"kind": "sequence", "normaliser": "tokens", **CLIPS}


def rollouts_config(folder, out, loss, row):
    """Returns the config of a training on a file with an answer a line."""
    draw, rows = random.Random(0), []
    for group, (turns, answers) in enumerate(GROUPS):
        for text, reward in answers.items():
            messages = [*turns, answer(text)]
            trained = "".join(f"{each['content']}." for each in messages if each["role"] == "assistant")
            logprobs = [draw.uniform(-6, -4) for _ in trained]  # letters, and ends of turns, are tokens
            rows.append({"group": group, "messages": messages, "reward": reward, "logprobs": logprobs})
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config_of(row, folder, out) | {
        "dataset": {
            "_component_": "recipe_utils.policy.rollout_dataset",
            "path": str(folder / "rollouts.jsonl"),
            "image_folder": str(folder),
        },
        "loss": {"_component_": "recipe_utils.policy.PolicyLoss", "tokens_per_chunk": 7, **loss},
        "optimizer": {"_component_": "tiny.RecordingSGD", "lr": RATE},
        "global_batch_size": GROUPS_PER_STEP,
        "batch_size": 1,
        "max_tokens_per_microbatch": 300,
    }


class OneAnswer(nn.Module):
    """transformers' own forward of one answer with its images, which are those of its tokens."""

    def __init__(self, path, sequences):
        super().__init__()
        self.model = model_in_float64(path)
        self.images = {tuple(sequence["tokens"]): sequence["image_inputs"] for sequence in sequences}

    def forward(self, tokens):
        return logits_of(self.model, tokens[0], self.images[tuple(tokens[0].tolist())])[None]


def single_answers(folder, kind, image_folder, loss):
    """Returns the gradients of each update step by the formulas of policies, answer by answer."""
    path = model_folder(folder, kind)
    dataset = RolloutDataset(FolderTokenizer(path), str(folder / "rollouts.jsonl"), image_folder=str(image_folder))
    sequences, groups = [], []
    for (_, answers), sample in zip(GROUPS, dataset, strict=True):
        sequences += sample["sequences"]
        groups.append([])
        for sequence, reward in zip(sample["sequences"], answers.values(), strict=True):
            first, *others = sequence["tokens"].tolist()
            beside = {"mask": sequence["labels"][1:] >= 0, "logprobs": sequence["logprobs"][1:]}
            groups[-1].append({"prompt_ids": [first], "completion_ids": others, "reward": reward, **beside})
    with set_default_dtype(torch.float64), DoublePrecision():
        model, steps, old = OneAnswer(path, sequences), [], None
        start, optimizer = deepcopy(model), torch.optim.SGD(model.parameters(), lr=RATE)
        for first in range(0, len(groups), GROUPS_PER_STEP):
            models, of_step = (model, old, start), groups[first : first + GROUPS_PER_STEP]
            _, gradients = metrics_and_gradients(policies.policy_gradient, models, of_step, loss)
            steps.append({name: torch.zeros_like(p) for name, p in model.named_parameters()} | gradients)
            optimizer.step()
            old = start
    return steps


@pytest.mark.parametrize(
    ("loss", "row"),
    [
        (WITH_KL, Row("qwen2_vl")),
        (OF_ANSWERS, Row("qwen2_vl", layout="fsdp-2")),
        slow(WITH_KL, Row("qwen2_vl", changes={"reference": "cached"})),
        slow(WITH_KL, Row("gemma3", layout="fsdp-2")),
        slow(OF_ANSWERS, Row("idefics3", "least_padding")),
    ],
)
def test_gradients_of_rollouts_are_those_of_single_answers(folder, tmp_path, loss, row):
    config = rollouts_config(folder, tmp_path / "out", loss, row)
    exact = single_answers(folder, row.kind, folder, loss)
    for computed in run_distributed(gradients_in_float64, LAYOUTS[row.layout][0], config, POLICY):
        assert len(computed) == len(exact) == 3
        for step, expected in zip(computed, exact, strict=True):
            assert error(step, expected) < TOLERANCE
    # Exchanged images of one size are noticed: alone in a prompt, and in two turns of an agent.
    for name, other in (("cat", "cow"), ("cow", "cat"), ("dog", "dog"), ("fox", "fox")):
        (tmp_path / f"{name}.png").write_bytes((folder / f"{other}.png").read_bytes())
    exchanged = single_answers(folder, row.kind, tmp_path, loss)
    assert all(error(step, other) > 1e-3 for step, other in zip(computed[:2], exchanged[:2], strict=True))


def test_a_resume_of_rollouts_with_images_is_bitwise(folder, tmp_path):
    row = Row("qwen2_vl", changes={"epochs": 2, "save_every_n_steps": 1})
    whole, stopped = (rollouts_config(folder, tmp_path / name, WITH_KL, row) | LR for name in ("whole", "stopped"))
    first = metrics_of({**stopped, "epochs": 1}, POLICY)
    rest = metrics_of({**stopped, "resume_from_checkpoint": True}, POLICY)
    assert [*first, *rest] == metrics_of(whole, POLICY)


EXCHANGE = '''def exchanged(microbatch):
    """Exchanges the first two images of a row, of one size."""
    images = microbatch.inputs["images"]
    if len(images.get("image_grid_thw", ())) < 2:
        return microbatch
    first, second, *others = images["pixel_values"].split(images["image_grid_thw"].prod(1).tolist())
    images = {**images, "pixel_values": torch.cat([second, first, *others])}
    return replace(microbatch, inputs={**microbatch.inputs, "images": images})


class FullFinetuneRecipe:'''


def test_the_command_that_checks_a_gradient_notices_exchanged_images(folder, tmp_path, monkeypatch, capsys):
    chats = [[turn("cat", "What?"), answer("A cat.")], [turn("Hi"), answer("Yes?")], [turn("cow"), answer("Moo")]] * 4
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    config = config_of(Row("qwen2_vl", changes=LR), folder, tmp_path)
    config["max_tokens_per_microbatch"] = 600
    config["dataset"]["path"] = str(tmp_path / "chats.jsonl")
    OmegaConf.save(OmegaConf.create(config), tmp_path / "my.yaml")
    call = "self.model.sums(microbatch)"
    changes = {
        "class FullFinetuneRecipe:": EXCHANGE, call: call.replace("microbatch", "exchanged(microbatch)"),
        "import torch\n": "from dataclasses import replace\n\nimport torch\n",
    }  # fmt: skip
    for recipe, code in ((SFT, 0), (changed_recipe(tmp_path, changes), 1)):
        monkeypatch.setattr(sys, "argv", ["check", str(recipe), "--config", str(tmp_path / "my.yaml")])
        with pytest.raises(SystemExit) as end:
            check_gradient.main()
        assert end.value.code == code, capsys.readouterr()
