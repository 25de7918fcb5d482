"""The peers that are tuned to prefer one answer of a pair: torchtune's recipe, TRL's trainer and a bare loop.

They take the config of ``full_dpo_update_step``. Each starts from the weights of ``checkpointer`` and has a
frozen reference of ``ref_checkpointer``, which is the same where there is none.
"""

import runpy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.data import padded_collate_dpo
from torchtune.utils import get_device

from recipe_utils.benchmark.hugging_face_peers import (
    gradients_by_torchtune_name,
    padding_tokenizer,
    report_loss,
    trainer_arguments,
)
from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.shared_by_peers import (
    IGNORE_INDEX,
    STOCK_RECIPES,
    BareModel,
    TakeModel,
    do_nothing,
    gradients_of,
    let_stock_recipe_run_on_cpu,
    make_lr_scheduler,
    row_of,
    samples_in_order,
)
from recipe_utils.data.loader.samples import Sample
from recipe_utils.parallel.process_group import world_size_from_env

SIDES = ("chosen", "rejected")


def train_stock_dpo(config: DictConfig, take_model: TakeModel) -> None:
    """Torchtune's own recipe, FSDP2 on any number of processes: for one device it has none of whole models.

    Args:
        config: keys that the stock recipe does not know are not read by it.
        take_model: gets this peer's gradients.
    """
    device = get_device(config.device)
    let_stock_recipe_run_on_cpu(device)
    store = dist.HashStore()  # type: ignore[attr-defined]
    alone: dict[str, Any] = {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group(
        training.get_distributed_backend(device.type, offload_ops_to_cpu=device.type != "cpu"),
        **({} if training.is_distributed() else alone),
    )
    config.ref_checkpointer = _of_reference(config).checkpointer
    path = STOCK_RECIPES / "full_dpo_distributed.py"
    recipe = runpy.run_path(str(path))["FullDPORecipeDistributed"](config)
    recipe.save_checkpoint = do_nothing
    recipe.setup(config)
    take_model(lambda: gradients_of(recipe._model))
    recipe.train()


def train_trl_dpo(config: DictConfig, take_model: TakeModel) -> None:
    """TRL's DPOTrainer on the checkpoint folder, the pairs and the optimizer of the config.

    Pairs are tokenized before the first step. TRL trains on all of an answer and nothing of its prompt; here
    it is told which tokens are targets. With several processes it trains with DDP.

    Args:
        config: ``checkpointer.checkpoint_dir`` must be a Hugging Face folder, and ``ref_checkpointer``
            null. The key ``precompute_ref_log_probs`` (False) computes those of the reference before
            training; ``attn_implementation`` is transformers' (sdpa).
        take_model: gets this peer's gradients.

    Raises:
        ValueError: a loss that is no plain DPO, or a reference of its own.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    loss = torchtune_config.instantiate(config.loss)
    if type(loss).__name__ != "DPOLoss" or loss.label_smoothing:
        raise ValueError(
            "loss: kind=trl trains with torchtune's DPOLoss without label_smoothing only"
        )
    if config.get("ref_checkpointer") is not None:
        raise ValueError(
            "ref_checkpointer: kind=trl takes the weights of checkpointer; set it to null"
        )
    tokenizer = torchtune_config.instantiate(config.tokenizer)
    pairs = samples_in_order(config, tokenizer, world_size_from_env())
    device = get_device(config.device)
    torchtune_config.instantiate(config.checkpointer)  # one of fresh weights writes them
    model = AutoModelForCausalLM.from_pretrained(
        config.checkpointer.checkpoint_dir,
        dtype=training.get_dtype(config.dtype, device=device),
        attn_implementation=config.get("attn_implementation", "sdpa"),
    )
    model.to(device)
    optimizer = torchtune_config.instantiate(config.optimizer, model.parameters())

    def collate(batch: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        tokens, labels = padded_collate_dpo(list(batch), tokenizer.pad_id, IGNORE_INDEX)
        lengths = [len(pair[f"{side}_input_ids"]) for side in SIDES for pair in batch]
        collated = {
            "input_ids": tokens,
            "attention_mask": (
                torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
            ).long(),
            "completion_mask": (labels != IGNORE_INDEX).long(),
        }
        for key in ("ref_chosen_logps", "ref_rejected_logps"):
            if key in batch[0]:
                collated[key] = torch.tensor([pair[key] for pair in batch])
        return collated

    class OfTokens(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    take_model(lambda: gradients_by_torchtune_name(model))
    args = DPOConfig(
        **trainer_arguments(config, device),
        beta=loss.beta,
        precompute_ref_log_probs=config.get("precompute_ref_log_probs", False),
        gradient_checkpointing=config.get("enable_activation_checkpointing", False),
        max_length=None,  # the config's tokenizer has cut them
        remove_unused_columns=False,
        bf16=False,  # no autocast: the model is in the config's precision
    )
    args._n_gpu = min(args.n_gpu, 1)  # or one process would use all GPUs of the machine
    trainer = OfTokens(
        model=model,
        args=args,
        data_collator=collate,
        train_dataset=Dataset.from_list([dict(pair) for pair in pairs]),
        processing_class=padding_tokenizer(tokenizer.pad_id),
        callbacks=[report_loss()],
        optimizers=(optimizer, make_lr_scheduler(config, optimizer)),
    )
    trainer.train()


def train_limit_dpo(config: DictConfig, take_model: TakeModel) -> None:
    """A bare loop that computes each answer once and nothing twice but what both sides of a pair begin with.

    A row holds both sides of some pairs, without any padding; each answer
    attends to itself alone, only target positions are projected onto the vocabulary, and the reference is
    live. It shares neither the loop nor the plan with the update-step recipe.

    Args:
        config: the key ``pairs_per_row`` is ``batch_size`` unless it is given.
        take_model: gets this peer's gradients.

    Raises:
        ValueError: a model other than torchtune's ``TransformerDecoder``.
    """
    policy, reference = BareModel(config), BareModel(_of_reference(config))
    reference.model.requires_grad_(False)
    loss_fn = torchtune_config.instantiate(config.loss)
    optimizer = torchtune_config.instantiate(config.optimizer, policy.model.parameters())
    lr_scheduler = make_lr_scheduler(config, optimizer)
    take_model(lambda: gradients_of(policy.model))
    tokenizer = torchtune_config.instantiate(config.tokenizer)
    pairs = samples_in_order(config, tokenizer, num_ranks=1)
    logger = LossLogger()
    per_step = config.batch_size * config.gradient_accumulation_steps
    for number, step in enumerate(_parts(pairs, per_step), start=1):
        loss_of_step = 0.0
        for part in _parts(step, config.get("pairs_per_row") or config.batch_size):
            sides = [
                {"tokens": pair[f"{side}_input_ids"], "labels": pair[f"{side}_labels"]}
                for side in SIDES
                for pair in part
            ]
            row = row_of(sides)
            num_targets = [
                sum(label != IGNORE_INDEX for label in each["labels"][1:]) for each in sides
            ]
            with torch.no_grad():
                of_reference = _sums(reference.log_probs(row), num_targets)
            of_policy = _sums(policy.log_probs(row), num_targets)
            losses, *_ = loss_fn(*of_policy, *of_reference)
            loss = losses.sum() / len(step)
            loss.backward()
            loss_of_step += loss.item()
        if config.get("clip_grad_norm") is not None:
            nn.utils.clip_grad_norm_(policy.model.parameters(), float(config.clip_grad_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if lr_scheduler is not None:
            lr_scheduler.step()
        logger.log("loss", loss_of_step, number)


def _sums(log_probs: Tensor, num_targets: Sequence[int]) -> Sequence[Tensor]:
    """Of p chosen and of p rejected answers, [p] each, from those of their targets [n]."""
    return torch.stack([each.sum() for each in log_probs.split(list(num_targets))]).chunk(2)


def _parts(pairs: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


def _of_reference(config: DictConfig) -> DictConfig:
    """The config with the reference's checkpointer as its checkpointer."""
    given = config.get("ref_checkpointer") or config.checkpointer
    return OmegaConf.create({**config, "checkpointer": given})
