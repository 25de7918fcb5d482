"""Passes before the pass: forwards without gradients whose outputs a loss finds beside its targets, in any layout.

A recipe computes what ``with self.attached(step) as microbatches`` yields: ``nothing_attached`` for a loss of one model,
``attached`` of a :class:`FrozenModel`, such as of a :func:`frozen_copy`, or a recipe's own :data:`Attached`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from torchtune.modules.peft import disable_adapter

from recipe_utils.checkpoint.peft import load_checkpoint
from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.adapters.lora import find_adapters
from recipe_utils.models.attention.packed_attention import attention_of
from recipe_utils.models.pipeline.schedule import PipelineSettings
from recipe_utils.models.pipeline.stages import adapters_of, has_output, local_stages
from recipe_utils.models.runner import Rows, Runner, build_modules, build_runner
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.transformers.interface import modules_for_images
from recipe_utils.models.vocabulary import check_same_tokens
from recipe_utils.models.weights import (
    check_weights,
    crc32_of_weights,
    fingerprint_of_config,
    load_weights,
    with_weights,
)
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.parallel.fsdp import local, reshard
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import naming
from recipe_utils.torchtune_names import MODEL_KEY, instantiate
from recipe_utils.update_steps.step import Microbatch, UpdateStep

Attached = Callable[[UpdateStep], AbstractContextManager[Sequence[Microbatch]]]
"""Maps an update step to its microbatches, with outputs that last until the end of the block."""
Context = Callable[[], AbstractContextManager[None]]


def nothing_attached(step: UpdateStep) -> AbstractContextManager[Sequence[Microbatch]]:
    """Returns the update step's own microbatches."""
    return nullcontext(step.microbatches)


@dataclass(eq=False)
class FrozenModel:
    """Model that runs without gradients and returns its loss module's outputs. All ranks together."""

    model: Runner
    during_forward: Context = nullcontext
    """Context of all forwards of an update step."""
    name: str = "frozen"
    """Name of its outputs in ``targets.outputs``."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Those of its weights, which a resumed training must have, too."""
    explain: Callable[[Microbatch, Any], str] | None = None
    """Returns the error of a microbatch's output that is NaN or infinite."""
    returning: Context = nullcontext
    """Context in which the loss module returns outputs, if it is that of the trained model."""
    attracts: bool = True
    """The gradient pulls the trained weights to this model, as a divergence from it does."""

    def outputs(self, microbatches: Sequence[Microbatch]) -> dict[int, Any]:
        """Returns the loss module's outputs by index; empty on ranks without the last stage.

        Microbatches are on the CPU, equally many on all ranks.
        """
        plain = [replace(m, targets=m.targets._replace(outputs={})) for m in microbatches]
        with self.during_forward(), self.returning():
            return self.model.outputs(plain)

    def check(self, microbatches: Sequence[Microbatch], outputs: Mapping[int, Any]) -> None:
        """Raises NonfiniteError for outputs that are NaN or infinite. Synchronizes with the device."""
        for index, output in outputs.items():
            if not all(tensor.cpu().isfinite().all() for tensor in tree_leaves(output)):
                text = f"{self.name}: outputs are NaN or infinite; look at the model's weights, or set dtype=fp32"
                raise NonfiniteError(self.explain(microbatches[index], output) if self.explain else text)

    @contextmanager
    def attached(self, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        """Yields the microbatches with outputs, computed before any gradient exists.

        They are unchanged on ranks without the last stage, which have no loss. Raises NonfiniteError, see
        :meth:`check`, on a CPU; elsewhere the gradient is not finite.
        """
        outputs = self.outputs(step.microbatches)
        if self.model.device.type == "cpu":
            self.check(step.microbatches, outputs)
        yield [
            m.with_outputs(**{self.name: outputs[index]}) if index in outputs else m
            for index, m in enumerate(step.microbatches)
        ]

    @contextmanager
    def output_layer(self) -> Iterator[Any]:
        """Yields the output layer, gathered until the end of the block; None on ranks without the last stage."""
        stage: Any = next(filter(has_output, local_stages(self.model.module)), None)
        if stage is None:
            yield None
            return
        output = text_decoder(stage).output
        # PyTorch's schedules reshard stages at their end, a forward reshards the root.
        holders = [module for module in (stage, output) if isinstance(module, FSDPModule)]
        for holder in holders:
            holder.unshard()
            # Sharded as a separate unit, the output layer would free its weight after every chunk.
            holder.set_reshard_after_forward(False, recurse=False)
        try:
            yield output
        finally:
            reshard(stage)


def frozen_copy(
    name: str,
    meta_model: nn.Module,
    loss_fn: Any,
    checkpointer: Any,
    settings: ModelSettings,
    ranks: Ranks,
    rows: Rows,
    *,
    split_points: list[int] | None = None,
    is_offloaded: bool = False,
    keys: tuple[str, str] | None = None,
    explain: Callable[[Microbatch, Any], str] | None = None,
) -> FrozenModel:
    """Builds a copy of a model for forward passes only, which return what ``loss_fn`` does; see :class:`FrozenModel`.

    Weights are those of ``checkpointer``, also when a training resumes. With ``pp`` ranks the copy has one stage per
    rank, cut at ``split_points`` or balanced by its own costs; outputs are on the rank of the last stage. ``rows`` are
    those of the trained model, with the copy's own attention. With ``is_offloaded`` weights are on the device only
    during forwards. ``keys`` are the config keys of the model and its checkpointer, by default ``name``.

    Raises ConfigError if the weights do not fit the model, or it cannot be built.
    """
    if find_adapters(meta_model).modules:
        raise ValueError(f"{name}: a model with adapters is its own start, see trained_model")
    of_model, of_checkpointer = keys or (name, name)
    checkpoint, fingerprints = load_frozen(checkpointer, of_checkpointer, meta_model, ranks)
    settings = settings.without_gradients()
    # Without a backward there is nothing to interleave.
    pipeline = PipelineSettings(pipeline_parallel_schedule="GPipe", pipeline_parallel_split_points=split_points)
    with naming(of_model):
        rows = rows._replace(attention=attention_of(meta_model, ranks.device, settings.packed_attention))
        model = build_modules(meta_model, lambda _: loss_fn, settings, pipeline, ranks, rows)
    with naming(of_checkpointer):
        load_weights(model, checkpoint, settings, ranks.device)
    model.requires_grad_(False).eval()

    @contextmanager
    def on_device() -> Iterator[None]:
        try:
            model.to(ranks.device)
            yield
        finally:
            model.cpu()

    context = on_device if is_offloaded else nullcontext
    return FrozenModel(build_runner(model, settings, pipeline, ranks), context, name, fingerprints, explain)


def trained_model(model: Runner, name: str, during_forward: Context = nullcontext) -> FrozenModel:
    """Returns the trained model itself without dropout; in ``during_forward`` it may have other weights.

    Its loss module runs there, too, without gradients; microbatches have no ``targets.outputs`` yet.
    """

    @contextmanager
    def in_evaluation() -> Iterator[None]:
        was_training = model.module.training
        model.module.eval()
        try:
            with during_forward():
                yield
        finally:
            model.module.train(was_training)

    return FrozenModel(model, in_evaluation, name)


def reference_checkpointer(component: Any, meta_model: nn.Module, policy_checkpointer: Any) -> Any:
    """Returns the checkpointer that ``component`` configures; if None, that of the policy, ``meta_model``.

    Raises ValueError if adapters need no checkpointer, or the reference has other tokens.
    """
    checkpointer = instantiate(component)
    if checkpointer is not None and find_adapters(meta_model).modules:
        raise ValueError("the reference of a model with adapters is what training starts from; leave it out")
    check_same_tokens(policy_checkpointer, checkpointer, ("policy", "reference"))
    return checkpointer or policy_checkpointer


def start_of_adapters(policy: Runner, name: str, checkpointer: Mapping[str, Any]) -> FrozenModel | None:
    """Returns the model with adapters that training starts from: ``policy`` itself, whose base needs no second copy.

    Without adapters, or with those of the ``adapter_checkpoint`` in the config of ``checkpointer``, copied now. None if the
    policy has none.
    """
    if not adapters_of(policy.module).modules:
        return None
    given, at_start = dict[str, str](), partial(disable_adapter, policy.module)
    if path := checkpointer.get("adapter_checkpoint"):
        given["checkpointer.adapter_checkpoint"] = f"{crc32(Path(checkpointer['output_dir'], path).read_bytes()):08x}"
        present = {key: local(p.detach()).clone() for key, p in parameters_by_name(policy.module).items()}
        at_start = partial(with_weights, policy.module, present)
    return replace(trained_model(policy, name, at_start), fingerprints=given)


def one_after_the_other(*passes: Attached) -> Attached:
    """Returns a pass of several passes, of which each sees the outputs of those before."""

    @contextmanager
    def attached(step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        with ExitStack() as stack:
            for each in passes:
                step = replace(step, microbatches=stack.enter_context(each(step)))
            yield step.microbatches

    return attached


def load_frozen(
    checkpointer: Any, key: str, meta_model: nn.Module, ranks: Ranks, checks: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a checkpoint, and fingerprints that a resumed training must have, too.

    ``key`` is the checkpointer's. Raises ConfigError if its weights do not fit ``meta_model``, unless not ``checks``: a
    model with adapters has further weights.
    """
    with naming(key):
        checkpoint = load_checkpoint(checkpointer, images=bool(modules_for_images(meta_model)))
        weights = checkpoint[MODEL_KEY]
        fingerprints = {key: crc32_of_weights(weights, ranks.cpu_group)}
        if checks:
            check_weights(meta_model, weights)
            folder = getattr(checkpointer, "_checkpoint_dir", None)
            for name, text in fingerprint_of_config(meta_model, folder).items():
                fingerprints[f"{key}.{name}"] = text
    return checkpoint, fingerprints
