"""How far each peer's gradient is from that of one big batch, on update steps that are hard.

The crafted update steps are one epoch of a dataset, of text here, of pairs of answers in
:mod:`recipe_utils.benchmark.crafted_pairs`, of text with a teacher in
:mod:`recipe_utils.benchmark.crafted_distillation`. A peer trains on it with learning rate 0, so that
every update step starts from the same weights, and its gradients are read as its optimizer steps.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import Dataset
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.utils import get_device

from recipe_utils.benchmark.shared_by_peers import IGNORE_INDEX, Gradients
from recipe_utils.benchmark.start_adapters import load_start, write_fresh_adapters
from recipe_utils.data.loader.samples import Sample
from recipe_utils.model.adapters.nf4 import without_quantising

BATCH_SIZE, GRADIENT_ACCUMULATION_STEPS = 2, 4
CRAFTED_ADAPTERS = "adapters.pt"
CHANGE_OF_CRAFTED = 0.05

# (masked prompt, targets) of each sample [tokens]; two make a microbatch as they come.
CASES: dict[str, list[tuple[int, int]]] = {
    "uneven": [(9, 3), (4, 5), (30, 200), (12, 180), (7, 1), (3, 40), (21, 90), (5, 2)],
    "no_targets_in_a_microbatch": [
        (6, 30), (11, 4), (3, 25), (8, 60), (17, 0), (40, 0), (5, 110), (9, 2),
    ],
    "every_token": [(0, 2), (0, 5), (0, 40), (0, 3), (0, 210), (0, 17), (0, 90), (0, 8)],
    "short_last_step": [(6, 12), (10, 70)],
}  # fmt: skip
"""Update steps in the order of the epoch; only the last one may be short."""


class CraftedDataset(Dataset[Sample]):
    """The samples of :data:`CASES`, case by case.

    Args:
        tokenizer: not used; recipes hand it over.
        num_token_ids: tokens are drawn from 1 to ``num_token_ids - 1``.
        max_seq_len: samples are cut to it [tokens].
        num_ranks: every sample comes so many times, with other tokens, which gives each rank a
            microbatch of the same kind.
    """

    def __init__(
        self, tokenizer: Any, num_token_ids: int, max_seq_len: int, num_ranks: int = 1
    ) -> None:
        rng = random.Random(0)
        self._samples: list[Sample] = []
        for prompt, targets in (size for sizes in CASES.values() for size in sizes):
            prompt = min(prompt, max_seq_len // 2)
            targets = min(targets, max_seq_len - prompt)
            for _ in range(num_ranks):
                tokens = [rng.randrange(1, num_token_ids) for _ in range(prompt + targets)]
                labels = [IGNORE_INDEX] * prompt + tokens[prompt:]
                self._samples.append({"tokens": tokens, "labels": labels})
        self._num_ranks = num_ranks

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def loss(self, model: nn.Module, samples: Sequence[Sample], _: DictConfig) -> Tensor:
        """Mean over all targets of the samples as one padded batch, in plain PyTorch, in fp64 [nats]."""
        device = next(model.parameters()).device
        tokens, targets = (each.to(device) for each in one_padded_batch(samples))
        logits = model(tokens)[:, :-1].double()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def cases(self) -> dict[str, list[Sample]]:
        """The samples of each case, of all ranks."""
        found, start = {}, 0
        for case, sizes in CASES.items():
            end = start + len(sizes) * self._num_ranks
            found[case] = self._samples[start:end]
            start = end
        return found


def one_padded_batch(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Tokens [b, s] of b samples, and what is to be predicted at all positions but the last, [b, s - 1]."""
    longest = max(len(sample["tokens"]) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full((len(samples), longest), IGNORE_INDEX)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample["tokens"])] = torch.tensor(sample["tokens"])
        labels[row, : len(sample["labels"])] = torch.tensor(sample["labels"])
    return tokens, labels[:, 1:]


CRAFTED_TEXT = "recipe_utils.benchmark.exactness.CraftedDataset"
CRAFTED = {
    "full_finetune_update_step": CRAFTED_TEXT,
    "full_dpo_update_step": "recipe_utils.benchmark.crafted_pairs.CraftedPairs",
    "knowledge_distillation_update_step": "recipe_utils.benchmark.crafted_distillation.CraftedDistillation",
}
"""The dataset of crafted update steps of each recipe."""


def crafted_config(
    config: Mapping[str, Any], num_ranks: int, folder: Path, dataset: str = CRAFTED_TEXT
) -> dict[str, Any]:
    """A peer's config with one epoch over the crafted update steps and learning rate 0.

    Args:
        config: of the peer, resolved.
        num_ranks: processes it runs as.
        folder: of :func:`write_references`; a model with adapters starts from those there.
        dataset: of the crafted update steps, with the methods of :class:`CraftedDataset`.
    """
    model, checkpointer = config["model"], config["checkpointer"]
    if "adapter_checkpoint" in checkpointer:
        checkpointer = {**checkpointer, "adapter_checkpoint": str(folder / CRAFTED_ADAPTERS)}
    return {
        **config,
        "checkpointer": checkpointer,
        "dataset": {
            "_component_": dataset,
            "num_token_ids": min(model.get("vocab_size", 1000), 1000),
            "max_seq_len": min(model.get("max_seq_len", 256), 256),
            "num_ranks": num_ranks,
        },
        "optimizer": {**config["optimizer"], "lr": 0.0},
        "lr_scheduler": None,
        "batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": GRADIENT_ACCUMULATION_STEPS,
        "max_steps_per_epoch": None,
        "last_update_step": "train",
        "clip_grad_norm": None,
        "shuffle": False,
    }


def write_references(config: DictConfig, folder: Path) -> None:
    """Writes the gradient of each case's samples, in plain PyTorch and float64.

    (torchtune's norms and rotary embeddings compute in fp32 all the same.) Of a model with adapters it
    also writes those that all start from: fresh ones leave half of the gradients zero.

    Args:
        config: of :func:`crafted_config`.
        folder: gets ``CASE.pt`` with a dict of gradients by the names of the trained parameters, and
            :data:`CRAFTED_ADAPTERS`.
    """
    device = get_device(config.device)
    folder.mkdir(parents=True, exist_ok=True)
    if "adapter_checkpoint" in config.checkpointer:
        write_fresh_adapters(config, CHANGE_OF_CRAFTED)
    with training.set_default_dtype(torch.float64), device, without_quantising():
        model = torchtune_config.instantiate(config.model)
    load_start(model, config, rounded_to=training.get_dtype(config.dtype, device=device))
    dataset = torchtune_config.instantiate(config.dataset, None)
    for case, samples in dataset.cases().items():
        model.zero_grad()
        dataset.loss(model, samples, config).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        torch.save(gradients, folder / f"{case}.pt")


class GradientErrors:
    """Compares the gradients at each optimizer step of this process with the reference.

    Args:
        folder: of :func:`write_references`.
        cases: of the crafted dataset, in the order of its epoch.
    """

    def __init__(self, folder: Path, cases: Sequence[str]) -> None:
        self._folder = folder
        self._cases = list(cases)
        self._gradients: Gradients | None = None
        self._errors: list[float] = []

    def install(self) -> None:
        """From now on every optimizer step of the process is compared."""
        register_optimizer_step_pre_hook(self._compare)

    def take_model(self, gradients: Gradients) -> None:
        """Takes what returns the gradients by parameter name."""
        self._gradients = gradients

    def per_case(self) -> dict[str, float | None]:
        """max|g - reference| / max|reference| of each case; None for a step that was never made."""
        errors: list[float | None] = [*self._errors, *[None] * len(self._cases)]
        return dict(zip(self._cases, errors, strict=False))

    def _compare(self, _: Optimizer, __: Any, ___: Any) -> None:
        assert self._gradients is not None
        gradients = self._gradients()  # a collective where they are sharded, so on every rank
        case = self._cases[len(self._errors)]
        references = torch.load(self._folder / f"{case}.pt", mmap=True, map_location="cpu")
        self._errors.append(relative_error(gradients, references))


def relative_error(gradients: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> float:
    """max|g - reference| / max|reference| over all parameters; a missing gradient counts as 0.

    Args:
        gradients: by parameter name.
        references: by parameter name, the same shapes.
    """
    difference = largest = 0.0
    for name, reference in references.items():
        reference = reference.double()
        gradient = gradients[name].cpu().double() if name in gradients else 0 * reference
        errors = [difference, (gradient - reference).abs().max().item()]
        # max() of Python drops a NaN, depending on the order.
        difference = torch.tensor(errors, dtype=torch.float64).max().item()
        largest = max(largest, reference.abs().max().item())
    return difference / largest
