"""Self-supervised training of a vision transformer with DINOv3's objective, whose loop goes over update steps.

The targets of an update step depend on all of its images: Sinkhorn-Knopp shares the prototypes evenly among
them. So the teacher, a moving average of the student, sees all microbatches of all ranks first, and what the
whole contributes to each target is one number per prototype. The gradient is that of one batch, however the
images are split over microbatches, ranks and pipeline stages.

    tune run dinov3_update_step --config vit/digits_dinov3_update_step
    tune run --nproc_per_node 2 dinov3_update_step --config vit/digits_dinov3_update_step \
      pipeline_parallel_dim=2

Read ``teaching`` and ``update`` for the mathematics, ``train`` for the order of things, ``setup`` for what
is trained on what. To change any of it: ``tune cp dinov3_update_step my_recipe.py``; it is called back for
``prepare`` and a pipeline's objective. All keys: ``python -m recipe_utils.settings RECIPE``.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune import config, training

import recipe_utils
from recipe_utils.data.images.collator import Views, ViewSamples, ViewSettings
from recipe_utils.data.images.crop_rows import layout_of
from recipe_utils.data.images.folders import load_images
from recipe_utils.data.images.labelled import ImageSamples, WholeImages
from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.microbatch import Microbatch, mark_last
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.evaluation.nearest_neighbors import NearestNeighbors
from recipe_utils.loss.attach_loss import attach_loss, compile_loss
from recipe_utils.loss.prototype_head import HeadArguments
from recipe_utils.loss.self_distillation import SUMS, ObjectiveSettings, SelfDistillationLoss
from recipe_utils.model.build.build import ModelSettings, build_model, build_on_meta
from recipe_utils.model.build.weights import load_weights
from recipe_utils.model.pipeline.pipeline import build_pipeline
from recipe_utils.model.pipeline.schedule import PipelineSettings
from recipe_utils.model.vision.average_teacher import AverageTeacher
from recipe_utils.model.vision.vision_transformer import fresh_vit_weights, layer_of, with_heads
from recipe_utils.optim.grad_norm import clip_grad_norm_by_part_
from recipe_utils.optim.moved import WeightsMoved
from recipe_utils.optim.nonfinite import NonfiniteError, NonfiniteGuard
from recipe_utils.optim.optimizer import (
    OptimizerSettings,
    build_lr_scheduler,
    trained_parameters,
    try_out,
)
from recipe_utils.optim.schedules import ScheduleSettings
from recipe_utils.parallel.fsdp import gradient_sync
from recipe_utils.parallel.process_group import mean_over_ranks
from recipe_utils.parallel.ranks import RankSettings, join_ranks
from recipe_utils.run.entry_point import entry_point
from recipe_utils.run.run import Run, RunSettings
from recipe_utils.settings.components import Component
from recipe_utils.settings.settings import ROOM, make_all, naming, read_settings

RECIPE_NAME = "dinov3_update_step"
recipe_utils.check_version("0.4", RECIPE_NAME)  # that this file was written for
METRICS = (*SUMS, "prototypes_used")
PARTS = ("output.dino", "output.ibot")  # of gradients each is clipped by itself, and the backbone


@dataclass(frozen=True, config=ROOM)
class Settings:
    """The config's keys. The YAML is flat; each room documents, defaults and checks its own."""

    data: DataSettings  # batch_size, global_batch_size, num_workers, ...
    views: ViewSettings  # transform, mask_ratio, koleo_group_size, ...
    objective: ObjectiveSettings  # ibot_loss_weight, sinkhorn_over, student_temperature, ...
    schedules: ScheduleSettings  # ema_momentum, teacher_temperature, layerwise_lr_decay, ...
    ranks: RankSettings  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
    modules: ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: PipelineSettings  # pipeline_parallel_schedule, ...
    updates: OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...

    model: Component
    """The backbone: ``recipe_utils.model.vision.vision_transformer.dinov3_vit`` or one of its sizes."""
    dataset: Component | list[Component]
    """Map-style, of images; labels are not looked at. A list is one dataset after the other. All ranks must see the
    same."""
    checkpointer: Component
    """Loads a backbone to start from, if it names one, and saves the teacher's:
    ``recipe_utils.checkpoint.dinov3_vit.DINOv3Checkpointer``."""
    dino_head: HeadArguments | None = None
    """Of crops: ``num_prototypes`` 65536, ``hidden_dim`` 2048, ``bottleneck_dim`` 256, ``num_layers`` 3."""
    ibot_head: HeadArguments | None = None
    """Of patches: likewise."""
    dataset_knn: Component | list[Component] | None = None
    """Images with labels whose neighbours tell the class of others; null is ``dataset``."""
    dataset_val: Component | list[Component] | None = None
    """Images with labels, for ``run_val_every_n_steps``: how many of them their neighbours name right."""

    def problems(self) -> Iterator[str]:
        """What is wrong between keys of different rooms."""
        yield from self.data.problems_with(self.ranks)
        yield from self.views.problems_with(self.data)
        yield from self.objective.problems_with(self.data, self.ranks)
        yield from self.modules.problems_with(self.ranks)
        yield from self.pipeline.problems_with(self.ranks, self.data)
        yield from self.updates.problems_with(self.data, self.ranks)
        yield from self.schedules.problems_with(self.objective.student_temperature)
        yield from self.run.problems_with(self.ranks, self.dataset_val)
        yield from self.run.problems_without_text()
        if self.ranks.tensor_parallel_dim > 1:
            yield f"tensor_parallel_dim={self.ranks.tensor_parallel_dim}: not with images; set it to 1"
        if self.updates.optimizer_in_bwd:
            yield "optimizer_in_bwd=True: not with a moving average; set it to False"


class DINOv3Recipe:
    """Trains a backbone and its heads on images, by what their moving average says of other views."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = join_ranks(self.settings.ranks)  # device, mesh, process groups, coordinates
        self.run = Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything; the weights are read once all the rest has been checked."""
        settings, ranks, run = self.settings, self.ranks, self.run
        modules, objective, updates = settings.modules, settings.objective, settings.updates
        make_model = with_heads(
            partial(config.instantiate, cfg.model),
            settings.dino_head or {},
            settings.ibot_head or {},
        )
        make_optimizer = partial(config.instantiate, cfg.optimizer)
        make_lr_scheduler = partial(config.instantiate, cfg.get("lr_scheduler"))
        whole, transform, self.checkpointer, *_ = make_all(
            model=partial(build_on_meta, make_model, modules),
            transform=partial(config.instantiate, cfg.transform),
            checkpointer=partial(config.instantiate, cfg.checkpointer, **run.from_stock),
            optimizer=partial(try_out, make_optimizer, make_lr_scheduler),
        )

        # ---- Data: what a sample is, and how update steps are made of them
        validates = run.validates_on(settings.dataset_val)
        dataset, dataset_knn, dataset_val = make_all(
            dataset=partial(load_images, cfg.dataset),
            dataset_knn=partial(
                load_images, (cfg.get("dataset_knn") or cfg.dataset) if validates else None, True
            ),
            dataset_val=partial(load_images, cfg.dataset_val if validates else None, True),
        )
        layout, fill = layout_of(whole), settings.pipeline.fill(ranks)
        with naming():
            views = Views(dataset, transform, settings.views, layout, settings.data.data_seed)
        kind = ViewSamples(settings.data, settings.views, layout)
        self.loader = UpdateStepLoader(views, kind, settings.data, ranks, "dataset", fill)
        self.loader.log_epoch_size()
        self.num_steps = settings.run.epochs * self.loader.steps_per_epoch
        if validates:
            data = settings.data.of_validation()
            bank, images = (
                UpdateStepLoader(
                    WholeImages(each, transform, layout),
                    ImageSamples(data, layout),
                    data,
                    ranks,
                    name,
                    fill,
                )
                for name, each in (("dataset_knn", dataset_knn), ("dataset_val", dataset_val))
            )
            with naming():
                self.neighbors = NearestNeighbors(bank, images, objective.knn_neighbors, ranks)

        # ---- Models: change modules in prepare(), before they are wrapped, sharded and filled
        def prepare(head: Any, backbone: nn.Module, has_output: bool) -> None:
            if has_output:
                attach_loss(backbone, head, settings.pipeline.splits_backward)

        build = lambda head: build_model(  # noqa: E731 # the student's and the teacher's
            make_model, partial(prepare, head), modules, ranks, settings.pipeline
        )
        self.loss_fn = SelfDistillationLoss(objective)
        if modules.compile:
            compile_loss(self.loss_fn, verbose=ranks.is_zero)
        with naming():
            self.model = build(self.loss_fn)
            self.teacher = AverageTeacher(build, objective, modules, settings.pipeline, ranks)
        run.open_log(cfg)
        with naming("checkpointer"):
            weights = fresh_vit_weights(whole, run.seed)
            weights |= self.checkpointer.load_checkpoint()[training.MODEL_KEY]
            load_weights(self.model, {training.MODEL_KEY: weights}, modules, ranks.device)
        # None for a model in one piece
        self.pipeline = build_pipeline(
            self.model, settings.pipeline, modules.torch_dtype, ranks, len(SUMS)
        )
        self.teacher.set_up(self.model, self.pipeline, weights)
        self.models = self.teacher.beside(self.model)  # what a checkpoint holds
        self.offloading = training.get_act_offloading_ctx_manager(
            self.model, modules.enable_activation_offloading
        )

        # ---- Optimizer, and back to where the training was
        depth_of = partial(layer_of, num_layers=len(whole.layers))
        groups = settings.schedules.groups(
            trained_parameters(self.model), updates.optimizer, depth_of, len(whole.layers) + 2
        )
        self.optimizer = make_optimizer(groups)
        self.nonfinite = NonfiniteGuard(self.optimizer, ranks.device, *updates.nonfinite)
        self.moved = WeightsMoved(self.optimizer, ranks.device)
        run.resume(self.models, self.optimizer, self.loader, {}, {})
        self.lr_scheduler = build_lr_scheduler(
            make_lr_scheduler, self.optimizer, self.num_steps, last_epoch=run.global_step - 1
        )

    # ---- The mathematics ------------------------------------------------------------------------

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Sums over the microbatch's images of what ``SUMS`` names, [7].

        The first is the loss; it is the backbone's head (``attach_loss`` above): there FSDP2 holds the
        weights of the heads gathered.
        """
        with self.offloading:
            return self.model(**microbatch.inputs, targets=microbatch.targets)

    def update(self, step: UpdateStep) -> tuple[Tensor, Tensor | None]:
        """One optimizer step along grad[(1 / N) sum_i w_d DINO_i + w_i iBOT_i + w_k KoLeo_i + w_g Gram_i].

        N images i of all microbatches on all ranks. Then the teacher follows the student.

        Returns:
            This rank's part of ``METRICS``, [8]; their means over all ranks are means per image. And the
            gradient norm before clipping, of all parts together.
        """
        schedules, run = self.settings.schedules, self.run
        schedules.set_weight_decay(self.optimizer, run.global_step, self.num_steps)
        temperature = schedules.temperature_at(run.global_step)
        self.loss_fn.teacher_temperature = temperature
        # dp_degree / images of all microbatches on all ranks: FSDP2 averages over the dp ranks, so every
        # image weighs the same and the accumulated gradient is final.
        scale = step.scale("images")
        metrics = torch.zeros(len(SUMS), device=self.ranks.device)
        # The teacher goes first, over all microbatches: its targets depend on all images.
        with self.teacher.teaching(step, temperature, self.max_images) as (taught, num_used):
            if self.pipeline is not None:
                # One schedule for all microbatches, so that its bubble is paid once per update step.
                sums = self.pipeline.forward_backward(taught, lambda sums: sums[0] * scale)
                metrics += sums * scale
            else:
                microbatches = mark_last(taught)
                for microbatch, is_last in to_device_ahead(microbatches, self.ranks.device):
                    with gradient_sync(self.model, is_last, self.settings.ranks.gradient_sync):
                        scaled = self.sums(microbatch) * scale
                        scaled[0].backward()
                    metrics += scaled.detach()

        schedules.freeze_prototypes(self.model, run.global_step)
        grad_norm = clip_grad_norm_by_part_(
            self.model, PARTS, self.settings.updates.clip_grad_norm, self.pipeline
        )
        # With a fused optimizer the host does not wait for the device here.
        if self.nonfinite.admits(grad_norm):
            self.optimizer.step()
        momentum = schedules.momentum_at(run.global_step, self.num_steps)
        self.teacher.follow(momentum, grad_norm, run.global_step + 1)  # where the student has moved
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat([metrics, num_used.to(metrics.dtype).view(1)]), grad_norm

    @property
    def max_images(self) -> int | None:
        """Of a rank, where KoLeo takes two passes over all images of an update step; else None."""
        in_groups = self.settings.views.koleo_group_size is not None
        takes_two = self.settings.objective.koleo_loss_weight > 0 and not in_groups
        return self.loader.samples_per_rank if takes_two else None

    @torch.no_grad()
    def validate(self) -> dict[str, Tensor]:
        """The share of ``dataset_val`` that nearest neighbours in ``dataset_knn`` name right, as the teacher sees both."""
        return {"knn_accuracy": self.neighbors.accuracy(self.teacher.states_of)}

    # ---- The order of things --------------------------------------------------------------------

    def train(self) -> None:
        """Runs all epochs, or until it is asked to stop; exports the teacher's backbone after each."""
        run = self.run
        self.model.train()
        for epoch in run.epochs():
            with self.loader.epoch(epoch, run.samples_consumed, run.stop) as steps:
                for step in run.progress(steps):
                    if step.totals["images"] == 0:
                        run.skip(step, "none of its images can be used")
                        continue
                    lr = self.optimizer.param_groups[-1]["lr"]
                    metrics, grad_norm = self.update(step)
                    if self.lr_scheduler is not None:
                        self.lr_scheduler.step()
                    run.advance(step)

                    if run.should_log():
                        # Read once the device has the next update step to do: nobody waits for it.
                        run.log(
                            **dict(zip(METRICS, mean_over_ranks(metrics), strict=True)),
                            lr=lr,
                            grad_norm=grad_norm,
                            **self.settings.schedules.at(run.global_step, self.num_steps),
                            effective_local_batch=self.loader.samples_per_rank,
                            effective_global_batch=step.totals["images"],
                            num_nonfinite_steps=self.nonfinite.read_and_restart(run.global_step),
                            **self.moved.read(step),
                            **run.throughput(),
                        )
                    if self.nonfinite.look(run.global_step, waits=run.must_know(step)):
                        run.save(self.models, self.optimizer)
                        raise NonfiniteError(self.nonfinite.description)
                    run.profiler.step()
                    if run.should_validate():
                        run.log_validation(**self.validate())
                    if step.stop_requested:  # on all ranks alike
                        run.save_and_stop(self.models, self.optimizer)
                        return
                    # Neither at an epoch's last step: it is done below. Exported first, so that a run
                    # that is killed meanwhile does it again.
                    if run.should_export(step):
                        run.export(
                            self.checkpointer, self.teacher.model, f"export_step_{run.global_step}"
                        )
                    if run.should_save(step):
                        run.save(self.models, self.optimizer)
            # Raises if it is the last and cannot be exported.
            problem = run.export(self.checkpointer, self.teacher.model, f"epoch_{epoch}")
            run.finish_epoch(self.models, self.optimizer, problem)


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Entry point: the config's keys, overridden by ``key=value`` on the command line."""
    recipe = DINOv3Recipe(cfg)
    with recipe.run:  # SIGTERM and SIGINT ask it to stop; every way out closes files and groups
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
