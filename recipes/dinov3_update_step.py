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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune import config, training

import recipe_utils
from recipe_utils.components import Component
from recipe_utils.data.loader import DataSettings, UpdateStep, UpdateStepLoader
from recipe_utils.data.microbatch import Microbatch, mark_last
from recipe_utils.data.to_device import to_device_ahead
from recipe_utils.data.views import (
    ImageSamples,
    Views,
    ViewSamples,
    ViewSettings,
    WholeImages,
    layout_of,
    load_images,
    of_global_crops,
    of_teacher,
)
from recipe_utils.loss.distillation import TeacherHidden
from recipe_utils.loss.head import attach_head
from recipe_utils.loss.prototype_bias import num_prototypes_used, prototype_bias
from recipe_utils.loss.self_distillation import (
    SUMS,
    ObjectiveSettings,
    PatchStates,
    SelfDistillationLoss,
    TeacherBottlenecks,
    TeacherViews,
)
from recipe_utils.loss.spreading import gradient_of_all
from recipe_utils.model.build import ModelSettings, build_model, build_on_meta
from recipe_utils.model.forward_only import ForwardOnly
from recipe_utils.model.heads import HeadArguments, with_heads
from recipe_utils.model.moving_average import MovingAverage
from recipe_utils.model.nearest_neighbors import gather_rows, num_voted_right
from recipe_utils.model.pipeline import build_pipeline
from recipe_utils.model.schedule import PipelineSettings
from recipe_utils.model.vision_transformer import fresh_vit_weights, layer_of
from recipe_utils.model.weights import load_weights
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
from recipe_utils.settings import ROOM, make_all, naming, read_settings

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
    """The backbone: ``recipe_utils.model.vision_transformer.dinov3_vit`` or one of its sizes."""
    dataset: Component
    """Map-style, of images; labels are not looked at. All ranks must see the same."""
    checkpointer: Component
    """Loads a backbone to start from, if it names one, and saves the teacher's:
    ``recipe_utils.checkpoint.dinov3_vit.DINOv3Checkpointer``."""
    dino_head: HeadArguments | None = None
    """Of crops: ``num_prototypes`` 65536, ``hidden_dim`` 2048, ``bottleneck_dim`` 256, ``num_layers`` 3."""
    ibot_head: HeadArguments | None = None
    """Of patches: likewise."""
    dataset_knn: Component | None = None
    """Images with labels whose neighbours tell the class of others; null is ``dataset``."""
    dataset_val: Component | None = None
    """Images with labels, for ``run_val_every_n_steps``: how many of them their neighbours name right."""

    def problems(self) -> Iterator[str]:
        """What is wrong between keys of different rooms."""
        yield from self.data.problems_with(self.ranks)
        yield from self.views.problems_with(self.data)
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
        make_backbone = partial(config.instantiate, cfg.model)
        make_model = with_heads(make_backbone, settings.dino_head or {}, settings.ibot_head or {})
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
        cfg_knn = cfg.get("dataset_knn") or cfg.dataset
        dataset, dataset_knn, dataset_val = make_all(
            dataset=partial(load_images, cfg.dataset),
            dataset_knn=partial(load_images, cfg_knn if validates else None),
            dataset_val=partial(load_images, cfg.dataset_val if validates else None),
        )
        layout, fill = layout_of(whole), settings.pipeline.fill(ranks)
        with naming():
            views = Views(dataset, transform, settings.views, layout, settings.data.data_seed)
        kind = ViewSamples(settings.data, settings.views, layout)
        self.loader = UpdateStepLoader(views, kind, settings.data, ranks, "dataset", fill)
        self.loader.say_what_an_epoch_is()
        self.knn_loaders = []
        if validates:
            data = settings.data.of_validation()
            for name, images in (("dataset_knn", dataset_knn), ("dataset_val", dataset_val)):
                whole_images, of_one_crop = (
                    WholeImages(images, transform, layout),
                    ImageSamples(data, layout),
                )
                self.knn_loaders.append(
                    UpdateStepLoader(whole_images, of_one_crop, data, ranks, name, fill)
                )
        self.num_steps = settings.run.epochs * self.loader.steps_per_epoch
        self.dp_group = ranks.new_dp_group()

        # ---- Models: change modules in build()'s prepare, before they are wrapped, sharded and filled
        def build(head: Any) -> nn.Module:
            def prepare(backbone: nn.Module, has_output: bool) -> None:
                if has_output:
                    attach_head(backbone, head, settings.pipeline.splits_backward)

            return build_model(make_model, prepare, modules, ranks, settings.pipeline)

        stages_of = partial(
            build_pipeline, settings=settings.pipeline, dtype=modules.torch_dtype, ranks=ranks
        )
        self.loss_fn = SelfDistillationLoss(objective)
        with naming():
            models = {"student": build(self.loss_fn), "teacher": build(TeacherBottlenecks())}
            if objective.gram_loss_weight:
                models["gram_teacher"] = build(PatchStates())
        self.model, teacher = models["student"], models["teacher"]
        run.open_log(cfg)
        with naming("checkpointer"):
            weights = fresh_vit_weights(whole, run.seed)
            weights |= self.checkpointer.load_checkpoint()[training.MODEL_KEY]
            for model in models.values():
                load_weights(model, {training.MODEL_KEY: weights}, modules, ranks.device)
        self.everything = nn.ModuleDict(models)  # what a checkpoint holds
        self.exported = teacher
        self.average = MovingAverage(teacher, self.model)
        # None for a model in one piece
        self.pipeline = stages_of(self.model, num_sums=len(SUMS))
        self.student_again = ForwardOnly(self.model, self.pipeline, ranks.device)
        self.teacher = ForwardOnly(teacher, stages_of(teacher), ranks.device)
        self.gram_teacher = self.gram_copy = None
        if "gram_teacher" in models:
            gram_teacher = models["gram_teacher"]
            self.gram_teacher = ForwardOnly(gram_teacher, stages_of(gram_teacher), ranks.device)
            self.gram_copy = MovingAverage(gram_teacher, teacher)

        # ---- Optimizer, and back to where the training was
        num_layers = len(whole.layers)
        depth_of = partial(layer_of, num_layers=num_layers)
        trained = trained_parameters(self.model)
        self.optimizer = make_optimizer(
            settings.schedules.groups(trained, settings.updates.optimizer, depth_of, num_layers + 2)
        )
        self.nonfinite = NonfiniteGuard(self.optimizer, ranks.device, *updates.nonfinite)
        self.moved = WeightsMoved(self.optimizer, ranks.device)
        run.resume(self.everything, self.optimizer, self.loader, {}, {})
        self.lr_scheduler = build_lr_scheduler(
            make_lr_scheduler, self.optimizer, self.num_steps, last_epoch=run.global_step - 1
        )

    # ---- The mathematics ------------------------------------------------------------------------

    @contextmanager
    def teaching(self, step: UpdateStep) -> Iterator[tuple[Sequence[Microbatch], Tensor]]:
        """The microbatches with what is said of all images of the update step, before any gradient exists.

        Sinkhorn-Knopp's targets are softmax(logits / t + log_u). Each microbatch has its own logits, which are
        made of bottlenecks when they are needed; log_u [k] is of all microbatches on all ranks.

        Yields:
            They, and how many prototypes are the likeliest of some global crop.
        """
        seen = [of_teacher(microbatch) for microbatch in step.microbatches]
        said = self.teacher.outputs(seen)
        anchors = self.gram_teacher.outputs(seen) if self.gram_teacher is not None else {}
        spread = self.spread(step)
        with self.teacher.output_layer() as heads:  # its prototypes are gathered until the end
            if heads is None:  # a pipeline's earlier stage, which has no loss
                yield step.microbatches, torch.zeros((), device=self.ranks.device)
                return
            of_crops, of_patches = zip(*(said[i] for i in range(len(seen))), strict=True)
            crop_biases = self.biases(heads.dino, of_crops)
            patch_biases = self.biases(heads.ibot, of_patches)
            temperature = self.loss_fn.teacher_temperature
            num_used = num_prototypes_used(
                of_crops, heads.dino.prototypes.weight, temperature, crop_biases, self.dp_group
            )
            taught = []
            for i, microbatch in enumerate(step.microbatches):
                crops = TeacherHidden(of_crops[i], heads.dino.prototypes, crop_biases[i])
                patches = TeacherHidden(of_patches[i], heads.ibot.prototypes, patch_biases[i])
                views = TeacherViews(crops, patches, anchors.get(i), spread.get(i))
                taught.append(microbatch.with_teacher(views))
            yield taught, num_used

    def biases(self, head: Any, rows: Sequence[Tensor]) -> list[Tensor]:
        """log_u for each microbatch's rows: that of the update step for all, or each its own."""
        objective = self.settings.objective
        log_u = partial(
            prototype_bias,
            weight=head.prototypes.weight,
            temperature=self.loss_fn.teacher_temperature,
            num_iterations=objective.sinkhorn_iterations,
        )
        if objective.sinkhorn_over == "microbatch":
            return [log_u([each]) for each in rows]
        return [log_u(rows, group=self.dp_group)] * len(rows)

    def spread(self, step: UpdateStep) -> dict[int, tuple[Tensor, Tensor]]:
        """KoLeo's gradient and mean for each microbatch, if all images of an update step are one group.

        The first of two passes: it takes one more forward of the global crops.
        """
        in_groups = self.settings.views.koleo_group_size is not None
        if in_groups or not self.settings.objective.koleo_loss_weight:
            return {}
        found = self.student_again.outputs([of_global_crops(each) for each in step.microbatches])
        if not found:
            return {}
        cls = [found[i] for i in range(len(found))]
        gradient, mean = gradient_of_all(
            torch.cat(cls), self.loader.samples_per_rank, self.dp_group
        )
        parts = gradient.split([len(each) for each in cls])
        return {i: (part, mean) for i, part in enumerate(parts)}

    def update(self, step: UpdateStep) -> tuple[Tensor, Tensor | None]:
        """One optimizer step along grad[(1 / N) sum over images of w_d DINO + w_i iBOT + w_k KoLeo + w_g Gram].

        N images of all microbatches on all ranks. Then the teacher follows the student.

        Returns:
            This rank's part of ``METRICS``, [8]; their means over all ranks are means per image. And the
            gradient norm before clipping, of all parts together.
        """
        schedules, run = self.settings.schedules, self.run
        self.loss_fn.teacher_temperature = schedules.temperature_at(run.global_step)
        schedules.set_weight_decay(self.optimizer, run.global_step, self.num_steps)
        # dp_degree / images of all microbatches on all ranks: FSDP2 averages over the dp ranks, so every
        # image weighs the same and the accumulated gradient is final.
        scale = step.scale("images")
        metrics = torch.zeros(len(SUMS), device=self.ranks.device)
        # The teacher goes first, over all microbatches: with stages in a schedule of its own.
        with self.teaching(step) as (taught, num_used):
            if self.pipeline is not None:
                # One schedule for all microbatches, so that its bubble is paid once per update step.
                sums = self.pipeline.forward_backward(taught, lambda sums: sums[0] * scale)
                metrics += sums * scale
                num_used = num_used * self.ranks.dims.pp  # known to the last stage only
            else:
                microbatches = mark_last(taught)
                for microbatch, is_last in to_device_ahead(microbatches, self.ranks.device):
                    with gradient_sync(self.model, is_last, self.settings.ranks.gradient_sync):
                        scaled = self.sums(microbatch) * scale
                        scaled[0].backward()
                    metrics += scaled.detach()

        if run.global_step < schedules.freeze_last_layer_steps:
            for name, parameter in self.model.named_parameters():
                if ".prototypes." in name:
                    parameter.grad = None
        grad_norm = clip_grad_norm_by_part_(
            self.model, PARTS, self.settings.updates.clip_grad_norm, self.pipeline
        )
        # With a fused optimizer the host does not wait for the device here.
        if self.nonfinite.admits(grad_norm):
            self.optimizer.step()
            self.momentum = schedules.momentum_at(run.global_step, self.num_steps)
            self.average.update(self.momentum, grad_norm)
        every = self.settings.objective.gram_teacher_every_n_steps
        if self.gram_copy is not None and (run.global_step + 1) % every == 0:
            self.gram_copy.update(0.0)
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat([metrics, num_used.to(metrics.dtype).reshape(1)]), grad_norm

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Sums over the microbatch's images of what ``SUMS`` names, [7].

        The first is the loss; it is the backbone's head (``attach_head`` above): there FSDP2 holds the weights
        of the heads gathered.
        """
        return self.model(**microbatch.inputs, targets=microbatch.targets)

    def validate(self) -> dict[str, float]:
        """The share of ``dataset_val`` whose nearest neighbours in ``dataset_knn`` name it right, as the teacher sees both."""
        (bank, bank_labels), (states, labels) = map(self.states_of, self.knn_loaders)
        found = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        if self.ranks.has_last_stage:
            bank, bank_labels = (gather_rows(each, self.dp_group) for each in (bank, bank_labels))
            num_neighbors = self.settings.objective.knn_neighbors
            found[0] = num_voted_right(states, labels, bank, bank_labels, num_neighbors)
            found[1] = len(labels)
        num_right, num_images = mean_over_ranks(found)
        return {"knn_accuracy": num_right / num_images}

    def states_of(self, loader: UpdateStepLoader) -> tuple[Tensor, Tensor]:
        """The teacher's cls states of this rank's images [n, d], and their labels [n]; of the last stage."""
        states, labels = [], []
        with loader.epoch(0) as steps:
            for step in steps:
                found = self.teacher.outputs(step.microbatches)
                for index in sorted(found):
                    states.append(found[index])
                    labels.append(step.microbatches[index].targets.labels[: len(found[index])])
        if not states:
            return torch.empty(0), torch.empty(0)
        return torch.cat(states), torch.cat(labels).to(self.ranks.device)

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
                        # With a fused optimizer the host waits for the device here only.
                        run.log(
                            **dict(zip(METRICS, mean_over_ranks(metrics), strict=True)),
                            lr=lr,
                            grad_norm=grad_norm,
                            ema_momentum=self.momentum,
                            teacher_temperature=self.loss_fn.teacher_temperature,
                            effective_local_batch=self.loader.samples_per_rank,
                            effective_global_batch=step.totals["images"],
                            num_nonfinite_steps=self.nonfinite.read_and_restart(run.global_step),
                            **self.moved.read(step),
                            **run.throughput(),
                        )
                        run.warn(self.nonfinite.warning)
                    if run.should_look(step) and self.nonfinite.look(run.global_step):
                        run.save(self.everything, self.optimizer)
                        raise NonfiniteError(self.nonfinite.description)
                    run.profiler.step()
                    if run.should_validate():
                        run.log_validation(**self.validate())
                    if step.stop_requested:  # on all ranks alike
                        run.save_and_stop(self.everything, self.optimizer)
                        return
                    # Neither at an epoch's last step: it is done below. Exported first, so that a run
                    # that is killed meanwhile does it again.
                    if run.should_export(step):
                        run.export(
                            self.checkpointer, self.exported, f"export_step_{run.global_step}"
                        )
                    if run.should_save(step):
                        run.save(self.everything, self.optimizer)
            # Raises if it is the last and cannot be exported.
            problem = run.export(self.checkpointer, self.exported, f"epoch_{epoch}")
            run.finish_epoch(self.everything, self.optimizer, problem)


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Entry point: the config's keys, overridden by ``key=value`` on the command line."""
    recipe = DINOv3Recipe(cfg)
    with recipe.run:  # SIGTERM and SIGINT ask it to stop; every way out closes files and groups
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
