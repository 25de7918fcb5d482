"""Update steps of a recipe's models, loss and optimizer on fake tensors, which have no numbers."""

import gc
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from omegaconf import DictConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtune.modules.peft import disable_adapter

from recipe_utils.data.collators import text_collator
from recipe_utils.distillation.distillation_loss import build_loss as build_distillation_loss
from recipe_utils.distillation.teacher import TeacherSettings
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.losses.attach import HiddenAtTargets
from recipe_utils.losses.divergences import TeacherHidden
from recipe_utils.losses.log_probs import LinearLogProbs
from recipe_utils.models.adapters.adapted_linear import speed_up_adapters
from recipe_utils.models.adapters.lora import find_adapters
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.frozen import FrozenModel, trained_model
from recipe_utils.models.pipeline.schedule import PipelineSettings
from recipe_utils.models.runner import Rows, Whole, build_modules, rows_of
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.sizes import limits_of
from recipe_utils.models.weights import materialize
from recipe_utils.optim.grad_norm import clip_grad_norm_
from recipe_utils.optim.optimizer import OptimizerSettings, build_optimizer, single_optimizers
from recipe_utils.parallel.fsdp import gradient_sync, local
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.policy.policy_losses import PolicyLoss
from recipe_utils.preference.pair_losses import PreferenceSettings
from recipe_utils.preference.pair_losses import build_loss as build_pair_loss
from recipe_utils.preference.pairs import PairSettings, pair_collator
from recipe_utils.settings.problems import ConfigError, build, naming
from recipe_utils.text.collator import RowCollator
from recipe_utils.torchtune_names import instantiate
from recipe_utils.update_steps.objective import declared_by
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch, mark_last


def row_of(collator: RowCollator, size: int, length: int) -> Microbatch:
    """Returns a microbatch of about ``size`` positions: samples of ``length`` tokens, at least one.

    Eight longer ones fill a packed row, in the same bytes. All tokens are targets, of pairs those not shared.
    """
    if collator.settings.is_packed:
        length = max(length, min(size // 8, collator.bounds.limits.max_seq_len))
    tokens, is_target = np.arange(length) % 7, np.arange(length) >= length // 2
    sample = {"tokens": tokens, "labels": tokens, **dict.fromkeys(collator.reader.columns, is_target * 1.0)}
    if collator.noun == "pair":
        sides = {"chosen": tokens, "rejected": tokens + is_target}
        sample = {f"{side}_input_ids": each for side, each in sides.items()}
        sample |= {f"{k}_labels": np.where(is_target, v, -100) for k, v in sides.items()}
    samples = [collator.prepare(sample, "sample 0")]
    num_samples = max(size // int(collator.collate(samples)[0].counts["positions"]), 1)
    return collator.collate(samples * num_samples)[0]


class TextSettings(Protocol):
    """Settings of the recipes for text; ``objective``, ``pairs`` and ``teacher`` are of one recipe each."""

    model: ModelSettings
    pipeline: PipelineSettings
    optimizer: OptimizerSettings
    data: DataSettings
    ranks: RankSettings
    objective: PreferenceSettings
    pairs: PairSettings
    teacher: TeacherSettings


class FakeTraining:
    """Models, loss and optimizer of a recipe for text or pairs on rank 0, with ``device=cpu``."""

    def __init__(self, cfg: DictConfig, settings: TextSettings, is_of_cuda: bool) -> None:
        self.settings, self.ranks, self._frozen = settings, settings.ranks.join(), None
        self._fake, self._live = FakeTensorMode(allow_non_fake_inputs=True), LiveBytes()
        self._is_of_pairs = hasattr(settings, "pairs")
        self._has_teacher = hasattr(settings, "teacher") and settings.teacher.kd_ratio > 0
        meta_model = build("model", build_on_meta, partial(instantiate, cfg.model), settings.model)
        meta_frozen, teacher = meta_model, None
        if hasattr(meta_model, "decoder"):
            raise ConfigError("model: images beside text have no forecast; set a decoder")
        modules, frozen_loss = settings.model.without_gradients(), None
        if self._is_of_pairs:
            loss_fn: Any = build_pair_loss(cfg, settings.objective.tokens_per_chunk)
            frozen_loss = loss_fn if loss_fn.needs_reference else None
        else:
            loss_fn = build_distillation_loss(cfg, settings.teacher.kd_ratio if self._has_teacher else 0)
            frozen_loss = LinearLogProbs() if getattr(loss_fn, "has_kl", False) else None
        if self._has_teacher:
            modules = settings.model.without_gradients(
                dtype=settings.teacher.teacher_dtype or settings.model.dtype,
                custom_sharded_layers=settings.teacher.teacher_custom_sharded_layers,
                quantizer=None,
            )
            make_teacher, frozen_loss = partial(instantiate, cfg.teacher_model), HiddenAtTargets()
            meta_frozen = teacher = build("teacher_model", build_on_meta, make_teacher, modules)
        kernel = settings.model.packed_attention
        limits = limits_of(meta_model, self.ranks.device, self.ranks.dims.tp, kernel, teacher)
        tokens: Any = SimpleNamespace(pad_id=0, max_seq_len=cfg.tokenizer.get("max_seq_len"))
        if self._is_of_pairs:
            self.collator = pair_collator(settings.data, tokens, limits, settings.pairs.prefix_sharing)
        else:
            declared = declared_by(loss_fn)
            self.collator = text_collator(settings.data, tokens, loss_fn.ignore_index, limits, declared=declared)
        # A step with numbers makes the tables that optimizers keep.
        small = nn.ModuleDict({"layers": nn.Linear(8, 8)})
        small["layers"].weight.grad = torch.zeros(8, 8)
        build("optimizer", build_optimizer, cfg.optimizer, small, settings.optimizer).step()
        rows = rows_of(limits, self.collator.longest_row, self.ranks)
        self._model = self._build(meta_model, rows, settings.model, loss_fn)
        self._optimizer = build_optimizer(cfg.optimizer, self._model.module, settings.optimizer)
        speed_up_adapters(self._model.module, self._optimizer)
        trained = [local(p) for p in self._model.module.parameters() if p.requires_grad]
        self.shares = {"weights": self._live.now, "gradients": sum(p.nbytes for p in trained)}
        if frozen_loss is not None and not self._has_teacher and find_adapters(meta_model).modules:
            self._frozen = trained_model(self._model, "reference", partial(disable_adapter, self._model.module))
            if isinstance(loss_fn, PolicyLoss):
                self._frozen = replace(self._frozen, returning=loss_fn.returning_log_probs)
        elif frozen_loss is not None:
            frozen = self._build(meta_frozen, rows._replace(attention=limits.attentions[-1]), modules, frozen_loss)
            frozen.module.requires_grad_(False).eval()
            self._frozen = FrozenModel(frozen, name="teacher" if self._has_teacher else "reference")
        self.shares["frozen models"] = self._live.now - self.shares["weights"]
        # Buffers of AdamW8bit's compiled update: 9 bytes per element of a parameter.
        is_compiled = is_of_cuda and cfg.optimizer._component_.endswith(".AdamW8bit")
        self._compiled_bytes = 9 * max(p.numel() for p in trained) * is_compiled

    def _build(self, meta_model: nn.Module, rows: Rows, modules: ModelSettings, loss_fn: Any) -> Whole:
        with naming():
            model = build_modules(meta_model, lambda _: loss_fn, modules, self.settings.pipeline, self.ranks, rows)
        with self._fake:
            weights = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in model.state_dict().items()}
        materialize(model, weights, modules, self.ranks.device)
        for tensor in [*model.parameters(), *model.buffers()]:
            self._live.hold(tensor)
        return Whole(model, self.ranks.device, len(declared_by(loss_fn).sums), modules)

    def measure(self, size: int, length: int, num_microbatches: int = 2) -> tuple[int, int, int]:
        """Makes an update step of equal rows, see :func:`row_of`; the first creates the optimizer's state.

        Returns positions per microbatch, peak bytes, and FLOPs per microbatch without the optimizer's.
        """
        row = row_of(self.collator, size, length)
        gc.collect()
        self._live.peak, self._live.flops = self._live.now, 0
        with self._fake, self._live, ExitStack() as held:
            self._update([row] * num_microbatches, held)
        states = (state for optimizer in single_optimizers(self._optimizer) for state in optimizer.state.values())
        tensors = (local(value) for state in states for value in state.values() if torch.is_tensor(value))
        self.shares["optimizer"] = sum(tensor.nbytes for tensor in tensors)
        return int(row.counts["positions"]), self._live.peak, self._live.flops // num_microbatches

    def _update(self, microbatches: list[Microbatch], held: ExitStack) -> None:
        if self._frozen is not None:
            outputs: list[Any] = [*self._frozen.outputs(microbatches).values()]
            if self._has_teacher:
                layer = held.enter_context(self._frozen.output_layer())
                outputs = [TeacherHidden(hidden, layer) for hidden in outputs]
            pairs = zip(microbatches, outputs, strict=True)
            microbatches = [microbatch.with_outputs(**{self._frozen.name: output}) for microbatch, output in pairs]
        for microbatch, is_last in mark_last(microbatches):
            with gradient_sync(self._model.module, is_last, self.settings.ranks.gradient_sync):
                sums = self._model.sums(microbatch)
                (sums[0] + sums[-1] if self._is_of_pairs else sums[0]).backward()
        # Not with the guard of a training, which reads numbers.
        clip_grad_norm_(self._model, self.settings.optimizer.clip_grad_norm)
        before = self._live.peak
        self._optimizer.step()
        if self._compiled_bytes:
            self._live.peak = max(before, self._live.now + self._compiled_bytes)
        self._optimizer.zero_grad(set_to_none=True)
