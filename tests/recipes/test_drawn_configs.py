"""Drawn configs train equal losses on any layout, or are refused by keys that they have.

Each seed draws a training (a row of ``TRAINING`` after the other may change it) and its layout (``LAYOUT``), each eighth one
with images beside text. It is trained twice: on that layout, and on one rank, a sample at a time. ``DRAWN_SEEDS=300-600
pytest --all FILE`` draws others.
"""

import contextlib
import io
import math
import os
import random
import re
import shutil
import sys
import traceback

import policies
import pytest
import tiny
import torch.distributed as dist
import yaml
from arrays import LAYOUTS
from big_batch_of_views import step_of_16
from distributed_runs import run_distributed
from gradient_rows import MODELS, OBJECTIVES, Row, config_of, folder_keys
from image_folders import image_keys, write_chats
from recipe_runs import (
    DINO,
    KD,
    POLICY,
    SFT,
    ListLogger,
    recipe_class,
    tiny_config,
    with_adapters,
    writing_to,
)

from recipe_utils.text.reader import TextReader
from recipe_utils.update_steps.step import UpdateStep

FIRST, END = map(int, os.environ.get("DRAWN_SEEDS", "0-24").split("-"))
PLACES = ["one", "one", "fsdp-2", "fsdp-2", "pp-2", "tp-2", *(name for name in LAYOUTS if name != "fsdp-3")]
FOLDERS = ["qwen3", "gemma3_text", "gpt_oss", "lfm2", "bloom"]
ADAM, STOCK = (
    "optimizer: {_component_: torch.optim.%s, lr: 0.01%s}",
    "loss: {_component_: torch%s}, sample_losses: False",
)
SPLIT = "optimizer: {_component_: recipe_utils.optim.Split, matrices: {_component_: torch.optim.RMSprop, lr: 0.01}, rest: {_component_: torch.optim.SGD, lr: 0.01}}"
BAD = "on_bad_sample: skip, dataset: {_component_: tiny.tiny_dataset, num_samples: 19, replace: {3: {tokens: [1, 2], labels: [1]}, 7: {tokens: null}}}"
KL = "kd_loss: {_component_: torchtune.modules.loss.%sLoss}, sample_losses: False"
TRAINING = [  # recipes and layouts, share of draws, and keys, of which one is drawn
    ("", 1, [ADAM % (name, more) for name in ("AdamW", "SGD") for more in ("", "", "", "", "", ", fused: True")]),
    ("", 0.4, [ADAM % (name, "") for name in ("NAdam", "Adafactor", "RMSprop")] + [SPLIT, ADAM % ("SGD", ", momentum: 0.9")]),
    ("", 0.1, ["optimizer: {_component_: recipe_utils.optim.AdamW8bit, lr: 0.01}"]),
    ("", 0.9, ["dtype: fp64", "dtype: fp64", "dtype: fp64", "dtype: fp32, weights_dtype: fp64"]),
    ("", 0.3, ["clip_grad_norm: 0.05"]),
    ("", 0.2, ["lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 1}"]),
    ("", 0.2, ["shuffle: False", "data_seed: 3", "epochs: 2", "max_steps_per_epoch: 5", "last_update_step: drop"]),
    ("", 0.1, ["weight_decay_of_vectors: False", "loraplus_lr_ratio: 3.0"]),
    ("full_f|distill", 0.2, [STOCK % "tune.modules.loss.CEWithChunkedOutputLoss", STOCK % ".nn.CrossEntropyLoss"]),
    ("full_f", 0.1, [BAD]),
    ("full_f", 0.2, ["run_val_every_n_steps: 2, dataset_val: {_component_: tiny.tiny_dataset, num_samples: 5, seed: 3}"]),
    ("distill", 0.4, [KL % f"{name}{how}" for name in ("ForwardKL", "SymmetricKL") for how in ("", "WithChunkedOutput")]),
    ("dinov3", 1, ["koleo_group_size: 2", "koleo_group_size: null"]),
]  # fmt: skip
LAYOUT = [
    ("", 1, ["microbatching: in_order", "microbatching: in_order, batch_size: 2"]),
    ("full|poli|disti", 0.8, ["microbatching: packed", "microbatching: least_padding", "microbatching: least_padding, batch_size: 2"]),
    ("full|poli|disti", 0.5, ["microbatching: packed, max_tokens_per_microbatch: 64", "microbatching: packed, max_tokens_per_microbatch: 24"]),
    ("sdp", 0.2, [f"microbatching: packed, max_tokens_per_microbatch: 24, max_ranks_per_row: {size}" for size in (2, 2, 4)]),
    ("dinov3", 0.6, ["batch_size: 2"]),
    ("pp", 0.6, [f"pipeline_parallel_schedule: {name}" for name in ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble")]),
    ("one", 0.3, ["global_batch_size: remove, gradient_accumulation_steps: 4, batch_size: 1, microbatching: in_order"]),
    ("", 0.4, ["gradient_sync: last_microbatch"]),
    ("", 0.3, ["enable_activation_checkpointing: True", "ac_mode: full", "ac_mode: selective, ac_option: 2"]),
    ("", 0.2, ["prefetch_update_steps: 0", "prefetch_update_steps: 1", "num_workers: 1"]),
    ("", 0.2, ["custom_sharded_layers: [tok_embeddings]", "custom_sharded_layers: [tok_embeddings, output]"]),
    ("", 0.1, ["fsdp_reshard_after_forward: False", "fsdp_cpu_offload: True", "balance_over_ranks: False"]),
    ("", 0.2, ["save_every_n_steps: 1, enable_async_checkpointing: True", "export_every_n_steps: 2"]),
    ("", 0.1, ["optimizer_in_bwd: True", "max_tokens_per_microbatch: 64", "packed_attention: by_document", "tensor_parallel_dim: 2"]),
    ("one", 0.1, ["optimizer_in_bwd: True, microbatching: in_order, batch_size: 4, max_tokens_per_microbatch: remove, clip_grad_norm: remove"]),
    ("dpo", 0.4, ["reference: offload", "reference: cached", "prefix_sharing: True", "prefix_sharing: False"]),
    ("distill", 0.2, ["teacher_custom_sharded_layers: [tok_embeddings]", "teacher_custom_sharded_layers: [output]"]),
]  # fmt: skip


def changed(config, table, where, draw):
    """Returns a config with drawn keys of the rows of a table that belong to its recipe and layout."""
    config = dict(config)
    for pattern, share, options in table:
        if re.search(pattern, where) and draw.random() < share:
            config |= yaml.safe_load(f"{{{draw.choice(options)}}}")
    return {key: value for key, value in config.items() if value not in (..., "remove")}


def drawn(seed, weights_folder, folder):
    """Returns a recipe, the config of the reference, and ranks and config of a training and of one that resumes it."""
    draw = random.Random(seed)
    name, place = draw.choice([*OBJECTIVES, *["policy"] * 6, *["dinov3"] * 4]), draw.choice(PLACES)
    model, few = draw.choice([*MODELS] * 2 + FOLDERS), {"global_batch_size": 4, "max_steps_per_epoch": 3}
    if seed % 8 == 4:  # with checkpoints, as each fourth
        recipe, place = SFT, draw.choice(["one", *(name for name in LAYOUTS if not re.search("tp|pp|3", name))])
        parts = draw.choice([["text", "projector", "tower"], ["text", "projector"], ["tower"]])
        keys = image_keys(write_chats(folder), draw.choice(["qwen2_vl", "gemma3", "idefics3", "llava"]), parts)
        config = tiny_config(weights_folder, **keys, **few, gradient_accumulation_steps=..., epochs=2)
    elif name == "dinov3":
        recipe, config = DINO, step_of_16(lambda: tiny_config(weights_folder), **few)
    elif name == "policy":
        recipe, config = POLICY, rollouts(draw, model, weights_folder, folder) | few
    else:
        recipe = OBJECTIVES[name].recipe
        model += f"/{draw.choice(['tied', 'untied'])}" if recipe == KD and model in MODELS else ""
        config = config_of(Row("one", model, objective=name, changes=few), weights_folder, folder)
    places = [place, draw.choice(["one", "fsdp-2"])]
    training = changed(config, TRAINING, f"{recipe} {place}", draw)
    trees = "tree" in str(training["dataset"])
    alone = {"batch_size": training.get("koleo_group_size") or 1, "microbatching": "packed" if trees else "in_order"}
    runs = [writing_to(folder / "reference", training | alone)]
    for each, more in zip(
        places, ({"save_every_n_steps": 2, "keep_last_n_checkpoints": 9}, {"resume_from_checkpoint": True}), strict=True
    ):
        world_size, dims = LAYOUTS[each]
        config = changed({**training, **dims, **(more if seed % 4 == 0 else {})}, LAYOUT, f"{recipe} {each}", draw)
        runs.append((world_size, writing_to(folder / str(len(runs)), config)))
    return recipe, *runs


def rollouts(draw, model, weights_folder, folder):
    """Returns a config of a file of rollouts."""
    loss = {"kind": draw.choice(["clipped", "sequence", "cispo", "reinforce"]), "old": draw.choice(["file", "start"])}
    loss |= {"normaliser": draw.choice(["tokens", "answers", "prompts"]), "kl_weight": draw.choice([0.0, 0.3])}
    loss |= {"kl": draw.choice(["k1", "k2", "k3"])} if loss["kl_weight"] else {}
    data = {"path": str(folder / "rollouts.jsonl"), "advantage": draw.choice(["mean_std", "mean", "given", "teacher"])}
    left_out = [*["advantage"] * (data["advantage"] != "given"), *draw.choice([["ref_logprobs"], []])]
    groups = policies.make_groups(11)
    groups = policies.of_whole_answers(groups) if loss["kind"] == "sequence" else groups
    policies.write(folder / "rollouts.jsonl", groups, left_out)
    keys = folder_keys(folder, "model", model) if model in FOLDERS else {"model": MODELS[model]}
    data, loss = (
        {"_component_": "recipe_utils.policy.rollout_dataset", **data},
        {"_component_": "recipe_utils.policy.PolicyLoss", **loss},
    )
    config = tiny_config(weights_folder, dataset=data, loss=loss, gradient_accumulation_steps=..., **keys)
    return with_adapters(config, folder) if "lora_rank" in config["model"] else config


# ---- On the ranks --------------------------------------------------------------------------------


def run_as_users_do(recipe, path, port, mutate):
    """Returns exit code, messages and metrics of this rank; its process group is the recipe's own."""
    with contextlib.suppress(RuntimeError):
        dist.barrier()  # all have connected
    dist.destroy_process_group()
    # The launcher's store, which final error messages pass through.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", MASTER_PORT=str(port))
    ListLogger.logged.clear()
    names = recipe_class(recipe).train.__globals__
    screen, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patches, tiny.float64_throughout(), contextlib.redirect_stderr(screen):
        patches.setattr(sys, "argv", [recipe, "--config", path])
        if mutate:
            mutate(patches, names)
        try:
            names["recipe_main"]()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, screen.getvalue(), list(ListLogger.logged)


def train(recipe, world_size, config, mutate=None):
    """Returns metrics of a training, and its refusal if keys of the config refuse it; all else is an AssertionError."""
    path = f"{config['output_dir']}.yaml"
    with open(path, "w") as file:
        print(yaml.safe_dump(config), file=file)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_distributed(run_as_users_do, world_size, recipe, path, store.port, mutate, timeout_seconds=300)
    codes, screens, logged = zip(*ranks, strict=True)
    text = "\n".join(screens)[-4000:]
    refused = re.search(r"problems? in the config:\n((?:  - .*\n?)+)", text)
    if not any(codes):
        return logged[0], None
    is_clear = refused and {*codes} == {2} and "Traceback" not in text
    assert is_clear, f"exit codes {codes}: {text}"
    heads = re.findall(r"^  - (.*?)(?:: |$)", refused[1], re.M)  # several keys may be wrong together
    strange = [head for head in heads if not {*re.findall(r"\w+", head)} & config.keys()]
    assert not strange, f"{strange} are not in the config: {refused[1]}"
    return [], refused[1]


def largest_difference(found, expected):
    """Returns the largest difference of metrics of two trainings, relative above 1, but of those that layouts change."""
    others, differences = {(m["step"], "loss" in m): m for m in expected}, [0.0]
    for metrics in found:
        other = others[metrics["step"], "loss" in metrics]
        for name in metrics.keys() & other.keys():
            a, b = float(metrics[name]), float(other[name])
            if not (
                re.search("second|padding|spanning|shared|effective", name)
                or a == b
                or (math.isnan(a) and math.isnan(b))
            ):
                differences.append(abs(a - b) / max(abs(b), 1.0))
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def outcome_of(seed, weights_folder, folder, mutate=None):
    """Returns the refusal of a drawn training, or the largest difference from its reference."""
    recipe, reference, (world_size, config), (num_resumed, resumed) = drawn(seed, weights_folder, folder)
    print(f"seed {seed}: {recipe} on {world_size} ranks", yaml.safe_dump(config), sep="\n")
    logged, refusal = train(recipe, world_size, config, mutate)
    if refusal:
        return refusal
    expected, refusal = train(recipe, 1, reference)
    assert not refusal, refusal
    assert [m["step"] for m in logged if "loss" in m] == [m["step"] for m in expected if "loss" in m]
    # 2^-53 or 2^-24 times some thousand operations, and what AdamW makes of small gradients. Mutants differ by 1e-3.
    tolerance = 1e-8 if config.get("dtype") == "fp64" and "path" not in config["model"] else 1e-4
    difference = largest_difference(logged, expected)
    if difference < tolerance and (folder / "1/step_2").exists():
        print(f"resumed on {num_resumed} ranks", yaml.safe_dump(resumed), sep="\n")
        shutil.copytree(folder / "1/step_2", folder / "2/step_2")
        logged, refusal = train(recipe, num_resumed, resumed)
        difference = max(difference, largest_difference([m for m in logged if m["step"] > 2], expected))
    assert difference < tolerance, f"{difference}: {logged}\n{expected}"
    return f"{difference:.1e} {refusal or ''}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, END))
def test_a_drawn_config_trains_equal_losses_or_is_refused_by_its_keys(seed, weights_folder, tmp_path):
    print(f"outcome of {seed}: {outcome_of(seed, weights_folder, tmp_path)}")


# ---- Wrong computations --------------------------------------------------------------------------


def a_mean_of_microbatches(patches, _):
    patches.setattr(UpdateStep, "scale", lambda self, _: self.dp_degree / len(self.microbatches))


def a_rank_counted_twice(patches, _):
    own = lambda step, name: sum(m.counts[name] for m in step.microbatches)  # noqa: E731
    patches.setattr(UpdateStep, "scale", lambda self, name: self.dp_degree / (self.totals[name] + own(self, name)))


def a_dropped_microbatch(patches, names):
    mark_last = names["mark_last"]
    patches.setitem(names, "mark_last", lambda microbatches: [*mark_last(microbatches)][-1:])


def weights_of_turns_dropped(patches, _):
    prepare = TextReader.prepare
    patches.setattr(TextReader, "prepare", lambda self, sample, *args: prepare(self, {k: v for k, v in sample.items() if k != "weights"}, *args))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "seed"),
    [
        (a_mean_of_microbatches, 32),
        (a_dropped_microbatch, 32),
        (a_rank_counted_twice, 46),
        (weights_of_turns_dropped, 46),
        (a_dropped_microbatch, 68),  # images
        (a_rank_counted_twice, 28),
    ],
)
def test_a_wrong_training_is_noticed(mutate, seed, weights_folder, tmp_path):
    with pytest.raises(AssertionError, match=r"^[0-9.e-]+: \["):
        outcome_of(seed, weights_folder, tmp_path, mutate)
