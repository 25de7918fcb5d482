"""Configs that are drawn: one training, and a layout for it. Half of what is drawn together nobody has tried before."""

import json
import random

import policies
import tiny
from arrays import LAYOUTS
from big_batch import HELD_OUT, MIXED
from big_batch_of_views import step_of_16
from chats import CHATML, say, tokenizer_of
from gradient_rows import DPO_LOSS, OBJECTIVES
from recipe_runs import (
    DINO,
    KD,
    STOCK_LOSS,
    cosine,
    tiny_config,
    tiny_dpo_config,
    tiny_kd_config,
    with_adapters,
    writing_to,
)
from tiny_transformers import keys_of_folder, save_tiny

OURS = {"_component_": "recipe_utils.losses.LinearCrossEntropyLoss"}
CROSS_ENTROPY = {"_component_": "torch.nn.CrossEntropyLoss"}
MODELS = [
    tiny.MODEL, tiny.UNTIED_MODEL, tiny.UNTIED_MODEL, tiny.MODEL, tiny.GEMMA2_MODEL,
    tiny.adapted(tiny.MODEL), tiny.adapted(tiny.UNTIED_MODEL, apply_lora_to_output=True),
    tiny.adapted(tiny.UNTIED_MODEL, use_dora=True), tiny.adapted(tiny.WIDE_MODEL, quantize_base=True),
    "qwen3", "gemma3_text", "gpt_oss", "lfm2", "bloom",
]  # fmt: skip
"""Models of torchtune, and types of transformers."""
OPTIMIZERS = [
    {"_component_": f"torch.optim.{name}", "lr": 0.01, **more}
    for name, more in (
        *[("AdamW", {}), ("SGD", {"momentum": 0.9}), ("SGD", {})] * 4,
        *[("AdamW", {"fused": True}), ("AdamW", {"foreach": False}), ("NAdam", {}), ("RMSprop", {})] * 2,
        *[("Adafactor", {}), ("SGD", {"fused": True}), ("Adagrad", {})],
    )
] + [
    {
        "_component_": "recipe_utils.optim.Split",
        "matrices": {"_component_": "torch.optim.Muon", "lr": 0.01},
        "rest": {"_component_": "torch.optim.AdamW", "lr": 0.01},
    },
    {"_component_": "recipe_utils.optim.AdamW8bit", "lr": 0.01},
]
SMALL = [{**each, "num_samples": 3} for each in MIXED]
TREES = {"_component_": "tiny.tiny_tree_dataset", "num_samples": 9}
BAD = {"replace": {"3": {"tokens": [1, 2], "labels": [1]}, "7": {"tokens": None, "labels": []}}}
SAMPLES = {"_component_": "tiny.tiny_dataset", "num_samples": 9, "num_without_targets": 2, "mask_prompts": False}
DATA = [
    *[{"dataset": SAMPLES}] * 3,
    {"dataset": {**SAMPLES, **BAD}, "on_bad_sample": "skip"},
    {"dataset": {**SAMPLES, "has_weights": True}},
    {"dataset": {**SAMPLES, "num_common": 15}},
    {"dataset": {**SAMPLES, "packed": True}},
    {"dataset": SMALL},
    {"dataset": SMALL, "loss_weights": "datasets"},
    {"dataset": [{**each, "has_weights": True, "weight": 1 + i} for i, each in enumerate(SMALL)]},
    {"dataset": [{**each, "loss_weight": 1} for each in MIXED]},
    {"dataset": [SAMPLES, {**SAMPLES, "seed": 3}]},
    {"dataset": TREES},
]
KL = "torchtune.modules.loss"
KD_LOSSES = [
    {},
    {"_component_": "recipe_utils.distillation.LinearDistillationLoss", "temperature": 2.0, "divergence": "symmetric"},
    *({"_component_": f"{KL}.{name}WithChunkedOutputLoss"} for name in ("ForwardKL", "ReverseKL", "SymmetricKL")),
    *({"_component_": f"{KL}.{name}Loss"} for name in ("ForwardKL", "ReverseKL", "SymmetricKL")),
]


class Draw:
    """Draws a config from a seed."""

    def __init__(self, seed, weights_folder, folder, models):
        self.random = random.Random(seed)
        self.weights, self.folder, self.models = weights_folder, folder, models
        self.one = self.random.choice
        some = [name for name in LAYOUTS if name != "fsdp-3"]
        self.place = self.one(["one", "one", "fsdp-2", "fsdp-2", "pp-2", "tp-2", *some])

    def maybe(self, share, *options):
        """Returns one of the options, or in most draws nothing."""
        return self.one(options) if self.random.random() < share else {}

    def saved(self, model_type, seed=0):
        """Returns keys of a model of transformers, with the vocabulary of :mod:`chats`."""
        path = self.models / f"{model_type}_{seed}"
        return keys_of_folder(path) if path.exists() else save_tiny(path, model_type, seed, vocab_size=400)

    def training(self):
        """Returns a recipe and a config, without a layout, of update steps of a few samples."""
        kind = self.one(["finetune"] * 3 + ["dpo", "policy", "distillation"] + ["dinov3"])
        model = self.one(MODELS if kind != "dinov3" else [None])
        is_folder = isinstance(model, str)
        if "pp" in self.place and not is_folder and model:
            model = {**model, "num_layers": 4} if tiny.base_of(model) in (tiny.MODEL, tiny.UNTIED_MODEL) else model
        common = {
            "gradient_accumulation_steps": ...,
            "global_batch_size": self.one([4, 5]),
            "optimizer": self.one(OPTIMIZERS),
            "process_group_timeout_seconds": 40,
            **self.maybe(0.8, {"dtype": "fp64"}, {"dtype": "fp64"}, {"dtype": "fp32", "weights_dtype": "fp64"}),
            **self.maybe(0.3, {"clip_grad_norm": 0.05}),
            **self.maybe(0.2, {"lr_scheduler": cosine(1)}),
            **self.maybe(0.1, {"weight_decay_of_vectors": False}, {"loraplus_lr_ratio": 3.0}),
            **self.maybe(0.2, {"shuffle": False}, {"data_seed": 3}, {"epochs": 2}, {"max_steps_per_epoch": 2}),
            **self.maybe(0.2, {"last_update_step": "drop"}, {"global_batch_size": 8}, {"sample_losses": True}),
        }
        if kind == "dinov3":
            val = {
                "dataset_val": {"_component_": "tiny.tiny_images", "num_images": 7},
                "run_val_every_n_steps": 2,
                "knn_neighbors": 3,
            }
            own = {
                "koleo_group_size": self.one([2, None]),
                "dataset": {"_component_": "tiny.tiny_images", "num_images": 9},
                **self.maybe(0.2, val),
                **self.maybe(0.2, {"layerwise_lr_decay": 0.8}, {"ema_momentum_end": 1.0}, {"freeze_last_layer_steps": 1}),
            }  # fmt: skip
            common.pop("sample_losses", None)
            common["global_batch_size"] = 4
            del common["gradient_accumulation_steps"]
            return DINO, step_of_16(lambda: tiny_config(self.weights), **{**common, **own})
        if is_folder:
            common |= self.saved(model)
        else:
            common["model"] = model
        held_out = [{key: value for key, value in each.items() if key != "weight"} for each in HELD_OUT]
        common |= self.maybe(0.25, {"dataset_val": held_out, "run_val_every_n_steps": 2})
        if kind in ("finetune", "distillation"):
            common |= self.one(DATA)
            common |= {"loss": self.one([OURS] * 6 + [STOCK_LOSS, CROSS_ENTROPY])}
            if is_folder and model != "bloom" and self.random.random() < 0.3:
                common |= self.conversations()
        if kind == "finetune":
            name, make = "full_finetune_update_step", tiny_config
        elif kind == "distillation":
            name, make = KD, tiny_kd_config
            common |= {"kd_ratio": self.one([0.5, 0.5, 1.0]), "teacher_sizes": tiny.UNTIED_TEACHER_MODEL}
            common |= {"kd_loss": kd_loss} if (kd_loss := self.one(KD_LOSSES)) else {}
            if is_folder:
                keys = ("teacher_sizes", "teacher_checkpointer")
                common |= zip(keys, self.saved(model, seed=1).values(), strict=True)
        elif kind == "dpo":
            name, make = "full_dpo_update_step", tiny_dpo_config
            losses = [each.config["loss"] for each in OBJECTIVES.values() if "DPO" in str(each.config.get("loss"))]
            pairs = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 9, "kind": self.one(tiny.PAIR_KINDS)}
            common |= {"dataset": pairs, "loss": self.one([DPO_LOSS, *losses])}
            common |= self.maybe(0.4, {"sft_loss_weight": 0.3})
            common.pop("dataset_val", None)
            common.pop("run_val_every_n_steps", None)
            if is_folder:
                common["ref_checkpointer"] = self.saved(model, seed=1)["checkpointer"]
        else:
            name, make = "full_policy_update_step", tiny_config
            common |= self.rollouts(model)
            common.pop("dataset_val", None)
            common.pop("run_val_every_n_steps", None)
        config = make(self.weights, **common)
        if "lora_rank" in config["model"]:
            name = self.one([name, name.replace("full_", "lora_")])
            config = with_adapters(config, self.folder)
        return name, config

    def conversations(self):
        """Returns keys of a file of conversations, of which some turns have weights, and its tokenizer."""
        weights = self.one([[None], [None], [0], [0, 0.5, None, 2]])
        path = self.folder / "chats.jsonl"
        lines = []
        for _ in range(9):
            turns = [say("user", "It is " + "x" * self.one([1, 4, 9])), say("assistant", "4." * self.one([1, 2, 5]))]
            given = [self.one(weights) for _ in range(2)]
            chat = [{**turn} for _ in given for turn in turns]
            for turn, weight in zip(chat[1::2], given, strict=True):
                turn |= {} if weight is None else {"weight": weight}
            lines.append(json.dumps({"messages": chat}))
        path.write_text("\n".join(lines) + "\n")
        tokenizer_of(self.folder / "tokenizer", CHATML)
        split = self.one([{}, {}, {"split_turns": True}, {"split_turns": "shared"}])
        return {
            "dataset": {"_component_": "recipe_utils.text.conversation_dataset", "path": str(path), **split},
            "tokenizer": {"_component_": "recipe_utils.text.folder_tokenizer", "path": str(self.folder / "tokenizer"), "max_seq_len": 128},
        }  # fmt: skip

    def rollouts(self, model):
        """Returns keys of a file of rollouts, of its loss, and of a reference."""
        kind, advantage = (
            self.one(["clipped", "sequence", "cispo", "reinforce"]),
            self.one(["mean_std", "mean", "given", "teacher"]),
        )
        has_reference, loss = self.random.random() < 0.5, {"kind": kind, "old": self.one(["file", "start"])}
        loss |= {"normaliser": self.one(["tokens", "answers", "prompts"])}
        loss |= self.maybe(0.4, *({"kl": kl, "kl_weight": 0.3} for kl in ("k1", "k2", "k3")))
        if loss["old"] == "start":
            loss |= self.maybe(0.5, {"correction": "truncate", "correction_high": 1.2})
        left_out = [*["advantage"] * (advantage != "given"), *["ref_logprobs"] * (not has_reference)]
        path = self.folder / "rollouts.jsonl"
        policies.write(path, policies.make_groups(9), left_out)
        keys = {
            "dataset": {
                "_component_": "recipe_utils.policy.rollout_dataset",
                "path": str(path),
                "advantage": advantage,
            },
            "loss": {"_component_": "recipe_utils.policy.PolicyLoss", "tokens_per_chunk": 7, **loss},
        }
        if isinstance(model, str):
            keys["ref_checkpointer"] = self.saved(model, seed=1)["checkpointer"]
        return keys

    def layout(self, recipe, config):
        """Returns the number of ranks and keys that change no loss, some of which are refused."""
        world_size, dims = LAYOUTS[self.place]
        dp_degree = world_size // dims.get("pipeline_parallel_dim", 1) // dims.get("tensor_parallel_dim", 1)
        plans = [{"microbatching": "in_order"}]
        if is_tree(config):
            plans = [{"microbatching": "packed"}, {"microbatching": "packed", "max_tokens_per_microbatch": 24}]
        elif recipe != DINO:
            plans += [
                *[{"microbatching": "least_padding", **self.maybe(0.5, {"max_tokens_per_microbatch": 64})}] * 2,
                *[{"microbatching": "packed", **self.maybe(0.5, {"max_tokens_per_microbatch": 64}, {"max_tokens_per_microbatch": 24})}] * 4,
            ]  # fmt: skip
        keys = {**dims, **self.one(plans), "batch_size": self.one([1, 2])}
        if recipe == DINO:
            keys["batch_size"] = self.one([1, 2, 2, 2, 4])
        if "max_tokens_per_microbatch" in keys and dp_degree > 1:
            keys |= self.maybe(0.3, {"max_ranks_per_row": 2}, {"max_ranks_per_row": 2}, {"max_ranks_per_row": 4})
        if "pipeline_parallel_dim" in dims:
            keys |= self.maybe(
                0.7,
                *(
                    {"pipeline_parallel_schedule": each}
                    for each in ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble")
                ),
            )
        total = config["global_batch_size"]
        if keys["microbatching"] == "in_order" and total % (dp_degree * keys["batch_size"]) == 0:
            steps = total // (dp_degree * keys["batch_size"])
            keys |= self.maybe(0.5, {"global_batch_size": ..., "gradient_accumulation_steps": steps})
        own = self.maybe(
            0.05,
            {"max_ranks_per_row": 2},
            {"balance_over_ranks": False},
            {"balance_over_ranks": True},
            {"max_tokens_per_microbatch": 64},
        )
        in_backward = {
            "optimizer_in_bwd": True,
            "microbatching": "in_order",
            "batch_size": -(-total // dp_degree),
            "clip_grad_norm": ...,
        }
        return world_size, {
            **keys,
            **own,
            **self.maybe(0.4, {"gradient_sync": "last_microbatch"}),
            **self.maybe(0.3, {"enable_activation_checkpointing": True}, {"ac_mode": "full"}, {"ac_mode": "selective", "ac_option": 2}),
            **self.maybe(0.2, {"prefetch_update_steps": 0}, {"prefetch_update_steps": 1}, {"num_workers": 1}),
            **self.maybe(0.2, {"custom_sharded_layers": ["tok_embeddings"]}, {"custom_sharded_layers": ["tok_embeddings", "output"]}, {"fsdp_reshard_after_forward": False}, {"fsdp_cpu_offload": True}),
            **self.maybe(0.2, {"export_every_n_steps": 2}, {"save_every_n_steps": 1}, {"save_every_n_steps": 2, "enable_async_checkpointing": True}, {"keep_best_checkpoint": True} if "dataset_val" in config else {}),
            **self.maybe(0.06, {"packed_attention": "by_document"}, {"enable_activation_offloading": True}, {"batch_size_val": 3}, {"tensor_parallel_dim": 2}, {"pipeline_parallel_split_points": [1]}),
            **self.maybe(0.06, in_backward, {"optimizer_in_bwd": True}),
            **(self.maybe(0.3, {"reference": "offload"}, {"reference": "cached"}, {"prefix_sharing": True}, {"prefix_sharing": False}) if "dpo" in recipe else {}),
            **(self.maybe(0.2, {"reference": "offload"}) if "policy" in recipe else {}),
            **(self.maybe(0.2, {"teacher_custom_sharded_layers": ["tok_embeddings"]}, {"teacher_custom_sharded_layers": ["output"]}, {"teacher_pipeline_parallel_split_points": [2]}) if recipe == KD else {}),
        }  # fmt: skip


def is_tree(config):
    """Returns True if sequences of a sample share beginnings, which needs rows of documents."""
    return config["dataset"] == TREES or "shared" in str(config["dataset"])


def reference_of(config):
    """Returns the same training on one rank, a sample or tree at a time; KoLeo's groups are whole."""
    plan = "packed" if is_tree(config) else "in_order"
    return {**config, "batch_size": config.get("koleo_group_size") or 1, "microbatching": plan}


def drawn(seed, weights_folder, folder, models):
    """Returns recipe, config of the reference, ranks, config, ranks and config that resume it from step 2, or None."""
    draw = Draw(seed, weights_folder, folder, models)
    recipe, training = draw.training()

    def laid_out(place):
        world_size, keys = draw.layout(recipe, training)
        config = {key: value for key, value in {**training, **keys}.items() if value is not ...}
        return world_size, writing_to(folder / place, config)

    first, resumed = laid_out("first"), None
    if draw.random.random() < 0.2:
        first[1].pop("enable_async_checkpointing", None)
        first[1].update(save_every_n_steps=2, keep_last_n_checkpoints=None)
        draw.place = draw.one(["one", "fsdp-2"])
        world_size, config = laid_out("resumed")
        resumed = world_size, {**config, "resume_from_checkpoint": True}
    return recipe, writing_to(folder / "reference", reference_of(training)), first, resumed
