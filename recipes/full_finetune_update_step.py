"""Fine-tuning of all weights or of adapters (LoRA, DoRA, QLoRA), on one or several processes.

An update step contains all microbatches of one optimizer step and their number of target tokens
over all data-parallel ranks, planned on the CPU before the first forward. Summed losses are
multiplied by one scale, so the gradient is that of one large batch for any split.

    tune run full_finetune_update_step --config llama3_2/5M_full_update_step
    tune run --nproc_per_node 2 full_finetune_update_step --config llama3_2/5M_full_update_step

``python -m recipe_utils.settings full_finetune_update_step`` prints all keys, and
``tune cp full_finetune_update_step my_recipe.py`` copies this file for changes.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function

from recipe_utils import check_version, data, losses, models, optim, parallel, training
from recipe_utils.parallel import gradient_sync, to_device_ahead
from recipe_utils.settings import STRICT, Component, Problem, build, read_settings
from recipe_utils.update_steps import DataSettings, UpdateStep, declared_by, mark_last

RECIPE_NAME = "full_finetune_update_step"
check_version("0.7", RECIPE_NAME)  # this file was written for it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Keys of the config, where those of all groups stand side by side. Each class documents and checks its own."""

    components: training.TextComponents  # model, tokenizer, dataset, dataset_val, checkpointer
    model: models.ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: models.PipelineSettings  # pipeline_parallel_schedule, ...
    optimizer: optim.OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: training.RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    data: DataSettings  # batch_size, global_batch_size, microbatching, num_workers, ...
    ranks: parallel.RankSettings  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
    loss: Component
    """``recipe_utils.losses.LinearCrossEntropyLoss`` (target positions only, in chunks), a stock loss, or yours."""
    loss_weights: Literal["tokens", "datasets"] = "tokens"
    """What the ``loss_weight`` of a named dataset weighs in an update step. ``tokens``: each target token;
    ``datasets``: the dataset's mean loss. The loss is divided by the sum of weights."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other."""
        yield from training.problems_between(self, weighs_datasets=True)
        yield from self.data.problems_of_long_rows(self.ranks)
        datasets = self.components.dataset, self.components.dataset_val
        yield from data.problems_of_weights(self.loss_weights, *datasets, self.loss)
        yield from training.problems_with_sample_losses(self.data, self.loss)


class FullFinetuneRecipe:
    """Fine-tunes a model, or its adapters, on a map-style dataset."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = self.settings.ranks.join()  # device, mesh, process groups, coordinates
        self.run = training.Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        settings, ranks = self.settings, self.ranks
        built = training.build_components(cfg, settings, self.run)  # tokenizer, meta_model, checkpointer
        loss_fn = build("loss", losses.build_loss, cfg.loss)
        self.declared = build("", declared_by, loss_fn)  # what it takes of each target, its divisor, its sums

        # Data: the collator makes rows that this model can compute.
        datasets = data.load_datasets(cfg, built.tokenizer)
        limits = models.limits_of(built.meta_model, ranks.device, ranks.dims.tp, settings.model.packed_attention)
        has_trees = any(data.facts_of(each).has_sequences for each in datasets)
        collator = data.text_collator(
            settings.data, built.tokenizer, loss_fn.ignore_index, limits, has_trees, declared=self.declared
        )
        self.loader, self.val_loader = data.build_loaders(*datasets, collator, settings.data, ranks, built.num_to_run)

        # Model: it ends in the loss. Its optimizer, what training does beside update steps, and resume.
        rows = models.rows_of(limits, collator.longest_row, ranks, settings.data.max_ranks_per_row)
        self.model = training.build_model(built, self.loader, rows, lambda stage: loss_fn, self.declared.sums)
        self.attached: models.Attached = models.nothing_attached  # or a pass before the pass
        if settings.loss_weights == "datasets":
            self.attached = partial(data.mean_of_datasets, datasets[0], ranks)
        self.stepper = training.build_stepper(built, self.model)
        training.add_usual_parts(built, self.model, self.stepper, self.validate, self.loader, self.val_loader, loss_fn)
        training.resume_run(built, self.model, self.stepper, self.loader)

    def objective(self, scaled: Tensor) -> Tensor:
        """Returns what is differentiated, [], of a microbatch's scaled sums [k]: the first, the weighted cross-entropy."""
        return scaled[0]

    def update(self, step: UpdateStep) -> tuple[dict[str, Tensor], Tensor | None]:
        """Computes gradients and makes one optimizer step.

        Returns this rank's part of the sums by name, whose means over ranks are means per target [nats], and the
        gradient norm before clipping, None with ``optimizer_in_bwd``.
        """
        # dp_degree / weights of the targets on all ranks, which were summed before this: FSDP2 averages gradients.
        scale = step.scale(self.declared.divisor)
        metrics = torch.zeros(len(self.declared.sums), dtype=torch.float64, device=self.ranks.device)
        with self.attached(step) as microbatches:
            if isinstance(self.model, models.Pipeline):
                # One schedule per update step pays the pipeline bubble once.
                sums = self.model.forward_backward(microbatches, lambda sums: self.objective(sums * scale))
                metrics += sums * scale
            else:
                for microbatch, is_last in to_device_ahead(mark_last(microbatches), self.ranks.device):
                    with gradient_sync(self.model.module, is_last, self.settings.ranks.gradient_sync):
                        scaled = self.model.sums(microbatch) * scale
                        with record_function("backward"):
                            self.objective(scaled).backward()
                    metrics += scaled.detach()
        return dict(zip(self.declared.sums, metrics, strict=True)), self.stepper.clip_and_step()

    def validate(self) -> dict[str, Tensor]:
        """Returns the sums per target of ``dataset_val``, over all ranks."""
        sums, totals = training.sum_over(self.val_loader, self.model, self.attached)
        metrics = {f"val_{name}": value for name, value in zip(self.declared.sums, sums, strict=True)}
        return parallel.means_over_ranks(metrics, totals, self.declared.divisor, self.ranks.dp_degree)

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        # A thread of the loader plans update steps on the CPU and sums their counts over all ranks, some steps ahead.
        for step in self.run.steps(self.loader, self.declared.divisor):
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm)


@training.entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = FullFinetuneRecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
