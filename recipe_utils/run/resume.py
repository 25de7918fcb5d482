"""What there is to go on from: found, checked, loaded, or put aside where a new run begins."""

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtune import training

from recipe_utils.checkpoint.folder import find_newest_whole, put_aside
from recipe_utils.checkpoint.load import DamagedError, TrainingState, changed_options, load
from recipe_utils.checkpoint.stock import check_stock_state, finds_stock_state, load_optimizer_state
from recipe_utils.checkpoint.tensors import AnyOptimizer
from recipe_utils.data.loader.loader import UpdateStepLoader
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.run.log import Log
from recipe_utils.run.settings import RunSettings
from recipe_utils.settings.problems import ConfigError


class Resume:
    """The newest whole checkpoint of a recipe, if the config asks for it. All ranks together.

    Args:
        recipe: its name; a checkpoint of another one is passed over.
        settings: of the run.
        config: the whole config, resolved.
        ranks: of the job.
        group: of all ranks, on the CPU.
        log: is told what is passed over.

    Raises:
        recipe_utils.settings.problems.ConfigError: there is none where there must be one, none of several is whole, or a
            stock recipe's state with pipeline stages.
    """

    def __init__(  # what it stands between
        self,
        recipe: str,
        settings: RunSettings,
        config: Mapping[str, Any],
        ranks: Ranks,
        group: dist.ProcessGroup,
        log: Log,
    ) -> None:
        self._recipe = recipe
        self._settings = settings
        self._config = config
        self._ranks = ranks
        self._group = group
        self._log = log
        self._passed_over: list[tuple[Path, str]] = []  # checkpoints that cannot be used, and why

        is_asked_for = bool(settings.resume_from_checkpoint)
        self.path = self._find_checkpoint() if is_asked_for else None
        self.from_stock = (
            is_asked_for and self.path is None and finds_stock_state(config["checkpointer"])
        )
        """Whether it is a state that a stock recipe has saved."""
        if self.path is None and not self.from_stock:
            self._check_that_nothing_is_lost()
        if self.from_stock and ranks.dims.pp > 1:
            raise ConfigError(
                f"pipeline_parallel_dim={ranks.dims.pp}: a recipe_state.pt can only be resumed from "
                "without a pipeline; set it to 1 until the next step checkpoint"
            )

    def new_run(self) -> str:
        """What a new run is known by; puts aside what another one has left, unless that is gone on from.

        Raises:
            recipe_utils.settings.problems.ConfigError: it could not be moved.
        """
        run_id, problem = "", None
        if self._ranks.is_zero:
            run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
            try:
                if not self._settings.resume_from_checkpoint:
                    self._put_aside(run_id)
            except OSError as error:
                problem = (
                    f"output_dir: checkpoints of an earlier run could not be put aside: {error}"
                )
        run_id, problem = gather_objects((run_id, problem), self._group)[0]
        if problem is not None:
            raise ConfigError(problem)
        return run_id

    def load(  # what a checkpoint must fit
        self,
        model: nn.Module,
        optimizer: AnyOptimizer,
        loader: UpdateStepLoader,
        data_fingerprint: Mapping[str, Any],
        frozen: Mapping[str, str],
    ) -> TrainingState:
        """Loads the checkpoint, or an older one where it turns out to be damaged.

        Args:
            model: loaded into in place.
            optimizer: likewise.
            loader: of the training's update steps.
            data_fingerprint: of these.
            frozen: what the weights that are not trained are known by.

        Raises:
            recipe_utils.files.CheckpointError: none can be used, or it does not fit.
        """
        with_data = None if self._settings.resume_with_other_data else data_fingerprint
        config = dict(self._config)
        if self._settings.resume_with_other_model:
            del config["model"]
        while True:
            assert self.path is not None
            try:
                state = load(
                    self.path,
                    model,
                    optimizer,
                    recipe=self._recipe,
                    data_fingerprint=with_data,
                    frozen=frozen,
                    config=config,
                    group=self._group,
                )
                break
            except DamagedError as error:
                self.path = self._find_checkpoint(older_than=self.path)
                if self.path is None:
                    raise DamagedError(
                        f"{error}; there is no older one. resume_from_checkpoint=False starts anew"
                    ) from error
                self._log.warn(f"{error}; passed over")
        num_samples = len(loader.dataset)
        if state.samples_consumed >= num_samples + loader.global_batch_size:
            raise ConfigError(
                f"resume_from_checkpoint: {self.path} has consumed {state.samples_consumed} samples of an epoch, "
                f"the dataset has {num_samples}; set the dataset that it was saved with"
            )
        return state

    def say_where(self, state: TrainingState, run_id: str) -> None:
        """Says where the training goes on, and what of the optimizer is the config's from now on."""
        self._log.info(
            f"Goes on from {self.path}: run {run_id}, epoch {state.epoch + 1}, after update step "
            f"{state.global_step}"
        )
        for key in sorted(changed_options(state.config, self._config)):
            then, now = (
                config["optimizer"].get(key, "its default")
                for config in (state.config, self._config)
            )
            self._log.info(f"optimizer.{key}: {then} in the checkpoint, {now} from now on")

    def load_stock(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer,
        loader: UpdateStepLoader,
        saved: Mapping[str, Any],
        seed: int,
    ) -> int:
        """Loads the recipe state that a stock recipe has saved at the end of an epoch.

        Returns:
            How many epochs are done.
        """
        check_stock_state(saved)
        load_optimizer_state(model, optimizer, saved[training.OPT_KEY], self._ranks.device)
        for key, here in (
            (training.SEED_KEY, seed),
            (training.MAX_STEPS_KEY, loader.settings.max_steps_per_epoch),
        ):
            if saved[key] != here:
                self._log.warn(f"{key}={here}: the checkpoint was saved with {saved[key]}")
        epochs: int = saved[training.EPOCHS_KEY]
        return epochs

    def _find_checkpoint(self, older_than: Path | None = None) -> Path | None:
        """The newest whole checkpoint, by names and sizes; the same on all ranks."""
        found = None
        if self._ranks.is_zero:
            found = find_newest_whole(Path(self._settings.output_dir), self._recipe, older_than)
        path, skipped = gather_objects(found, self._group)[0]
        self._passed_over = skipped
        for other, reason in skipped:
            self._log.warn(f"resume_from_checkpoint: {other} is passed over: {reason}")
        return path

    def _put_aside(self, run_id: str) -> None:
        aside = put_aside(Path(self._settings.output_dir), run_id)
        if aside is not None:
            found = ", ".join(sorted(path.name for path in aside.iterdir()))
            self._log.warn(
                f"output_dir={self._settings.output_dir}: it holds checkpoints of an earlier run ({found}), which "
                f"are in {aside} now; resume_from_checkpoint=True goes on from them, once they are back"
            )

    def _check_that_nothing_is_lost(self) -> None:
        """There is no whole checkpoint to go on from. Raises ConfigError, unless that was to be expected."""
        key = f"resume_from_checkpoint={self._settings.resume_from_checkpoint}"
        folder = self._settings.output_dir
        if self._settings.resume_from_checkpoint and self._passed_over:
            raise ConfigError(
                f"{key}: none of the checkpoints in {folder} can be used ("
                + "; ".join(f"{path.name}: {reason}" for path, reason in self._passed_over[:3])
                + f"; {len(self._passed_over)} in all); resume_from_checkpoint=False starts anew"
            )
        if self._settings.resume_from_checkpoint is True:
            raise ConfigError(
                f"{key}: there is no checkpoint in {folder}; set resume_from_checkpoint=auto to start where "
                "there is none"
            )
