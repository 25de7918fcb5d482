"""Loads the checkpoint to resume from; moves those of earlier runs to a backup."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_utils.checkpoint.folder import find_newest_whole, move_to_backup, read_as
from recipe_utils.checkpoint.load import DamagedError, TrainingState, differences, load
from recipe_utils.checkpoint.tensors import note_options
from recipe_utils.files import CheckpointError
from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.construct import rates_of
from recipe_utils.models.pipeline.schedule import PipelineSettings
from recipe_utils.models.pipeline.stages import adapters_of, local_stages
from recipe_utils.optim.stepper import Stepper
from recipe_utils.parallel.fsdp import local, sharded_as
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.settings.keys import own_keys
from recipe_utils.settings.problems import ConfigError
from recipe_utils.torchtune_names import set_seed
from recipe_utils.training.log import Log
from recipe_utils.training.parts.protocol import Parts
from recipe_utils.training.settings import RunSettings
from recipe_utils.update_steps.loader import UpdateStepLoader

_WITHOUT_INFLUENCE = (
    own_keys(RunSettings).keys() | own_keys(RankSettings).keys() | own_keys(PipelineSettings).keys()
) - {"epochs"}
"""Keys that may change from run to run without changing what is learned."""


@dataclass
class Trained:
    """Objects that a recipe has built, which are saved, resumed and exported."""

    model: nn.Module
    stepper: Stepper
    loader: UpdateStepLoader
    checkpointer: Any
    """Exports the model."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Those of frozen weights, which must equal the checkpoint's; see :attr:`TrainingState.frozen`."""
    exported: nn.Module | None = None
    """Model that is exported; None for ``model``."""


@dataclass
class Resume:
    """Newest complete checkpoint of a recipe, if training resumes; others' are skipped.

    ``config`` is resolved; ``group`` is a CPU group of all ranks; ``parts`` are those of the training.
    """

    recipe: str
    settings: RunSettings
    config: Mapping[str, Any]
    ranks: Ranks
    group: dist.ProcessGroup
    log: Log
    parts: Parts

    @cached_property
    def path(self) -> Path | None:
        """Path of the checkpoint; None to start from scratch. Raises ConfigError if one is required."""
        if not self.settings.resume_from_checkpoint:
            return None
        path = self._find_checkpoint()
        if path is not None:
            return path
        # Training would start from scratch, which a ``recipe_state.pt`` of torchtune's recipes is not meant for.
        cfg, folder = self.config["checkpointer"], self.settings.output_dir
        default = Path(str(cfg.get("output_dir")), "recipe_state", "recipe_state.pt")
        if (name := cfg.get("recipe_checkpoint")) is not None or default.exists():
            raise ConfigError(
                f"checkpointer.recipe_checkpoint={name or default}: training cannot resume from torchtune's "
                "recipe_state.pt; remove recipe_checkpoint, set resume_from_checkpoint=False and another output_dir, and load "
                "the weights saved beside it with checkpoint_dir and checkpoint_files"
            )
        key = f"resume_from_checkpoint={self.settings.resume_from_checkpoint}"
        if self._skipped:  # checkpoints and the reasons
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in self._skipped[:3])
            raise ConfigError(
                f"{key}: none of the checkpoints in {folder} can be used ({reasons}; "
                f"{len(self._skipped)} in all); resume_from_checkpoint=False starts from scratch"
            )
        if self.settings.resume_from_checkpoint is True:
            raise ConfigError(
                f"{key}: there is no checkpoint in {folder}; set resume_from_checkpoint=auto to start without one"
            )
        return None

    def restore(self, trained: Trained, seed: int) -> TrainingState:
        """Loads model, optimizer and the states of parts in place if training resumes. Returns the initial state.

        Raises ConfigError if ranks have different data or old checkpoints cannot be moved,
        CheckpointError if no checkpoint can be used.
        """
        # What decides which samples an update step has, on all ranks alike. The transform of images is a part of it.
        transform = self.config.get("transform") or {}
        fingerprint = {**trained.loader.dataset.fingerprint, **trained.loader.order.fingerprint()}
        fingerprint |= {f"transform.{key}": value for key, value in transform.items()}
        fingerprints = gather_objects(fingerprint, self.group)
        if others := [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]:
            changed = differences(fingerprints[0], fingerprints[others[0]])
            key, (of_rank_zero, of_other) = next(iter(changed.items()))
            raise ConfigError(
                f"dataset: ranks {', '.join(map(str, others))} have other samples than rank 0 "
                f"({key}: {of_other} instead of {of_rank_zero}); give all ranks the same files and "
                "the same tokenizer"
            )
        # Before the first schedule changes them: a resume recognizes options that are built otherwise by these.
        note_options(trained.stepper.optimizer, lr_scheduler=self.config.get("lr_scheduler"))
        folder = self.settings.output_dir
        state = TrainingState(
            recipe=self.recipe,
            global_step=0,
            epoch=0,
            samples_consumed=0,
            seed=seed,
            data_fingerprint=fingerprint,
            config=dict(self.config),
            frozen=dict(trained.fingerprints),
            run_id=self._new_run(),  # moves old checkpoints, so after all other checks
        )
        # Of a resumed training this is only what the checkpoint is compared with.
        if self.path is not None:
            return self._resume(self._load(trained, state), state)
        self.log.info(f"Run {state.run_id} starts in {folder}")
        if self.settings.resume_from_checkpoint == "auto":
            self.log.info(f"resume_from_checkpoint=auto: no checkpoint in {folder}; starts from scratch")
        return state

    @property
    def saved(self) -> TrainingState | None:
        """State of the checkpoint; None without one, or if its file is corrupt."""
        with suppress(CheckpointError):
            return read_as(TrainingState, self.path / "state.json") if self.path else None
        return None

    def _new_run(self) -> str:
        """Returns a new run id. Unless training resumes, moves old checkpoints to a backup."""
        run_id, problem = "", None
        folder = self.settings.output_dir
        # Rank 0 renames folders for all, and its clock and random numbers make the id of all.
        if self.ranks.is_zero:
            run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
            try:
                resumes = self.settings.resume_from_checkpoint
                backup = None if resumes else move_to_backup(Path(folder), run_id)
                if backup is not None:
                    names = ", ".join(sorted(path.name for path in backup.iterdir()))
                    self.log.warn(
                        f"output_dir={folder}: checkpoints of an earlier run ({names}) are moved to "
                        f"{backup}; move them back to resume from them"
                    )
            except OSError as error:
                problem = f"output_dir: checkpoints of an earlier run cannot be moved: {error}"
        run_id, problem = gather_objects((run_id, problem), self.group)[0]
        if problem is not None:
            raise ConfigError(problem)
        return run_id

    def _load(self, trained: Trained, now: TrainingState) -> TrainingState:
        """Loads the checkpoint, or an older one if it is corrupt."""
        # Nothing was changed by a checkpoint that cannot be read, so an older one can be tried.
        while True:
            assert self.path is not None
            try:
                state = load(
                    self.path,
                    trained.model,
                    trained.stepper.optimizer,
                    now,
                    other_data=self.settings.resume_with_other_data,
                    other_model=self.settings.resume_with_other_model,
                    part_tensors=self.parts.tensors(),
                    group=self.group,
                )
                break
            except DamagedError as error:
                self.path = self._find_checkpoint(older_than=self.path)
                if self.path is None:
                    raise DamagedError(
                        f"{error}; there is no older one. resume_from_checkpoint=False starts from scratch"
                    ) from error
                self.log.warn(f"{error}; skipped")
        # With resume_with_other_data, a shorter dataset may end before the position of the checkpoint.
        num_samples, order = len(trained.loader.dataset), trained.loader.order
        last_end = order.end(state.epoch, order.num_steps(state.epoch) - 1)
        if state.samples_consumed >= max(num_samples + order.end(state.epoch, 0), last_end + 1):
            raise ConfigError(
                f"resume_from_checkpoint: {self.path} has consumed {state.samples_consumed} samples "
                f"of an epoch, the dataset has {num_samples}; set the dataset that it was saved with"
            )
        return state

    def _resume(self, saved: TrainingState, now: TrainingState) -> TrainingState:
        """Returns the position of ``saved`` in this run; logs it and what differs."""
        if saved.seed != now.seed:
            self.log.warn(f"seed={now.seed}: the checkpoint was saved with {saved.seed}")
            set_seed(now.seed)  # instead of the checkpoint's random states
        self.log.info(
            f"Resumes from {self.path}: run {saved.run_id}, epoch {saved.epoch + 1}, after update step {saved.global_step}"
        )
        then, current = _movable(saved.config), _movable(now.config)
        for key, (before, after) in differences(then, current, "its default").items():
            if key.partition(".")[0] not in _WITHOUT_INFLUENCE:
                self.log.info(f"{key}: {before} in the checkpoint, {after} from now on")
        for name in self.parts.load(saved.parts):
            self.log.info(f"{name}: the checkpoint has no state of it, so it starts here")
        kept = {name: getattr(now, name) for name in ("seed", "data_fingerprint", "config", "frozen")}
        return replace(saved, **kept)

    def _find_checkpoint(self, older_than: Path | None = None) -> Path | None:
        """Returns the newest checkpoint with all files in full size, the same on all ranks."""
        newest = None
        if self.ranks.is_zero:
            newest = find_newest_whole(Path(self.settings.output_dir), self.recipe, older_than)
        path, self._skipped = gather_objects(newest, self.group)[0]
        for other, reason in self._skipped:
            self.log.warn(f"resume_from_checkpoint: {other} is skipped: {reason}")
        return path


def _movable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config whose paths below ``output_dir``, which may have been moved, are relative to it."""
    folder = json.dumps(f"{config.get('output_dir')}/")[:-1]
    relative: dict[str, Any] = json.loads(json.dumps(dict(config)).replace(folder, '"${output_dir}/'))
    return relative


def warnings_of(model: nn.Module, settings: RunSettings) -> Iterator[str]:
    """Yields warnings of random numbers in forwards, and of ``save_adapter_weights_only`` without adapters."""
    adapters = adapters_of(model).modules
    if settings.save_adapter_weights_only and not adapters:
        yield "save_adapter_weights_only=True: the model has no adapters; exports all weights"
    rates, name_of_dropout = dict[str, float](), "lora_dropout" if adapters else "dropout"
    for module in model.modules():
        for name, rate in rates_of(module).items():
            name = name_of_dropout if name == "p" else name
            rates[name] = max(rate, rates.get(name, 0))
    for name, rate in rates.items():
        yield (
            f"model.{name}={rate}: {name.split('_')[-1]} depends on microbatches and ranks, so the "
            "losses of two layouts are equal in the mean only; 0 is exact"
        )


def norms_of_frozen_rows(model: nn.Module, tokens: Sequence[int], ranks: Ranks) -> dict[str, None]:
    """Returns the norms of stop tokens' embeddings and output rows, where frozen, as lines. All ranks together."""
    lines: dict[int, str] = {}  # of a tied weight once
    names = {"tok_embeddings": "embeddings", "output": "output rows"} if tokens else {}
    for part, (attribute, name) in product(map(text_decoder, local_stages(model)), names.items()):
        module = getattr(part, attribute, None)
        weight: Any = getattr(module, "weight", None)
        is_trained = isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())
        if not isinstance(weight, Tensor) or weight.requires_grad or is_trained or local(weight).is_meta:
            continue
        dtype = torch.promote_types(weight.dtype, torch.float32)
        of_shard = torch.linalg.vector_norm(local(weight), dim=1, keepdim=True, dtype=dtype)
        norms: Any = sharded_as(weight, of_shard.to(ranks.device))
        norms = norms.full_tensor() if isinstance(norms, DTensor) else norms
        rows = ", ".join(f"{each}: {norms[each].item():.3g}" for each in tokens if each < len(norms))
        text = f"Stop tokens: norm of their frozen {name} {rows}; median of all {norms.median().item():.3g}"
        lines.setdefault(id(weight), text)
    return dict.fromkeys(chain(*gather_objects([*lines.values()], ranks.cpu_group)))
