"""Rounds: an epoch's rollouts come when the epoch begins, from an engine that has loaded the export of the one before.

Example: ``path: rounds`` and ``groups_per_round: 64``. Epoch 1 reads ``rounds/round_0001.jsonl``, with 64 groups, makes its update
steps and exports ``epoch_0``. Then training waits for ``rounds/round_0002.jsonl``, which an engine writes under another name
(``round_0002.jsonl.tmp``) and renames, or which a sampler writes with the model under training.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from torch.utils.data import Dataset

from recipe_utils.cli.advice import how_to_resume
from recipe_utils.files import write_atomically
from recipe_utils.models.runner import Runner
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.parallel.stop import all_reduce_any
from recipe_utils.policy.rollouts import RolloutDataset, check_advantage, check_fields, fields_of_first
from recipe_utils.policy.sampler import ModelSampler, file_of, mean_reward
from recipe_utils.settings.components import Component
from recipe_utils.settings.keys import STRICT, OnlyWith
from recipe_utils.settings.problems import ConfigError, Problem, naming
from recipe_utils.text.conversations.paths import PathRows
from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.run import Run
from recipe_utils.training.setup import Built
from recipe_utils.update_steps.samples import Facts, SampleError, facts_of

_POLL_SECONDS = 0.2
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RoundSettings:
    """Rounds: where their rollouts come from."""

    wait_seconds: Annotated[float, Field(ge=0), OnlyWith("dataset", argument="groups_per_round")] = 3600.0
    """Maximum wait for the file of a round."""
    sampler: Annotated[Component | None, OnlyWith("dataset", argument="groups_per_round")] = None
    """recipe_utils.policy.ModelSampler: writes the file of each round with the model under training; null waits for the
    files."""
    sampler_val: Annotated[Component | None, OnlyWith("run_val_every_n_steps")] = None
    """Sampler whose mean reward is logged as ``val_reward``."""

    def problems_of_rounds(self, ranks: RankSettings, dataset_val: Any) -> Iterator[Problem]:
        """Yields samplers beside pipeline stages, and rounds of a validation."""
        if any(isinstance(each, dict) and each.get("groups_per_round") for each in (dataset_val, *(dataset_val or ()))):
            text = "a validation has no rounds; set path to a file, or sampler_val in place of dataset_val"
            yield Problem("dataset_val.groups_per_round", text)
        for key in ("sampler", "sampler_val"):
            if getattr(self, key) is not None and ranks.pipeline_parallel_dim > 1:
                stages = f"pipeline_parallel_dim={ranks.pipeline_parallel_dim}"
                yield Problem(key, f"{stages} cannot generate; leave the key out, and sample from exported models")


class RoundsDataset(Dataset[dict[str, Any]]):
    """Rollouts of one round after the other: items are those of the open one.

    Args:
        path: folder of ``round_0001.jsonl`` (or .jsonl.gz, .parquet), ``round_0002.jsonl``, ...
        groups_per_round: number of groups in each.
        advantage, fields: see :class:`.RolloutDataset`; without ``fields`` those of the first file that is opened.
        read: builds the dataset of a file.

    Raises:
        ValueError: ``path`` is a file, ``groups_per_round`` is below 1, or ``fields`` has a wrong name.
    """

    def __init__(
        self,
        path: str,
        groups_per_round: int,
        advantage: str,
        fields: Iterable[str] | None,
        read: Callable[..., RolloutDataset],
    ) -> None:
        self.path, self._num_groups, self.advantage, self._read = Path(path), groups_per_round, advantage, read
        self.fields = None if fields is None else frozenset(fields)
        """Those of :data:`.FIELDS` that the rows of each round have; None until that is known."""
        check_fields(self.fields or (), self.fields or (), path)
        if groups_per_round < 1:
            raise ValueError(f"groups_per_round={groups_per_round}: set it to 1 or more")
        if not self.path.is_dir() and self.path.exists():
            text = "it is a file; set it to the folder of round_0001.jsonl, ..., or take groups_per_round out"
            raise ValueError(f"path={path}: {text}")
        self.rollouts: RolloutDataset | None = None
        """Those of the open round."""

    def __len__(self) -> int:
        return self._num_groups

    def facts(self) -> Facts:
        """Returns what the rows of all rounds have."""
        return Facts(True, self.fields, self.advantage == "teacher", comes_later=(self,))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a group of the open round."""
        if self.rollouts is None:
            raise SampleError("no round has begun: only a training reads rounds, of a dataset that is not in a list")
        return self.rollouts[index]

    def file_of(self, number: int) -> Path:
        """Returns the file of a round, from 1; where there is none, the name of that to write."""
        files = [self.path / f"round_{number:04d}{suffix}" for suffix in _SUFFIXES]
        return next((file for file in files if file.exists()), files[0])

    def open(self, number: int) -> str:
        """Opens the file of a round. Returns the hash of its content.

        Raises ConfigError for another number of groups, for a row that is no JSON object, and for less or more fields than
        those of all rounds.
        """
        file = self.file_of(number)
        with naming("dataset"):
            rollouts = self._read(str(file), fields=self.fields)
        try:
            rollouts.check_rows()
        except SampleError as error:
            text = f"{error}; write the file under another name, and rename it once it is whole"
            raise ConfigError(Problem("dataset.path", text, file.parent)) from None
        if len(rollouts) != self._num_groups:
            text = f"{file} has {len(rollouts)} groups; write as many as groups_per_round"
            raise ConfigError(Problem("dataset.groups_per_round", text, self._num_groups))
        self.rollouts, self.fields = rollouts, rollouts.fields
        return rollouts.content_hash


def rollout_dataset(
    tokenizer: Any,
    path: str | list[str],
    advantage: str = "mean_std",
    group_size: int | None = None,
    truncates_answers: bool = False,
    groups_per_round: int | None = None,
    fields: list[str] | None = None,
    ignored_keys: Sequence[str] = (),
    image_folder: str | None = None,
) -> RolloutDataset | RoundsDataset:
    """Returns the :class:`RolloutDataset` of a file or files, or, of a folder, the :class:`RoundsDataset`."""
    check_advantage(advantage)
    read = partial(
        RolloutDataset,
        tokenizer,
        advantage=advantage,
        group_size=group_size,
        truncates_answers=truncates_answers,
        ignored_keys=ignored_keys,
        image_folder=image_folder,
    )
    if groups_per_round is None:
        return read(path, fields=fields)
    if not isinstance(path, str):
        raise ValueError(f"path={path}: with groups_per_round it is a folder; set one")
    return RoundsDataset(path, groups_per_round, advantage, fields, read)


def add_rounds(
    built: Built, dataset: Any, settings: RoundSettings, sampler: ModelSampler | None, model: Runner
) -> None:
    """Adds the part that opens the file of each round, if ``dataset`` reads rounds, or transforms their samples.

    It may wait for the first one: which models a training has beside the policy depends on the fields of its rows.
    """
    for rounds in facts_of(dataset).comes_later:
        if isinstance(rounds, RoundsDataset):
            part = Rounds(built.run, rounds, settings, sampler, model.module, built.tokenizer)
            built.run.parts.add("rounds", part)
            part.find_fields()


class Rounds(Part):
    """Opens the file of each round on all ranks, after it was written by ``sampler``, or by others.

    A checkpoint has the hash of the open file's content, so that a training resumes within a round with the same file,
    and the fields of its rows, which are those of all rounds.
    """

    def __init__(
        self,
        run: Run,
        dataset: RoundsDataset,
        settings: RoundSettings,
        sampler: ModelSampler | None,
        model: nn.Module,
        tokenizer: Any,
    ) -> None:
        self._run, self._dataset, self._wait_seconds = run, dataset, settings.wait_seconds
        self._sampler, self._model, self._tokenizer = sampler, model, tokenizer
        self._open: dict[str, Any] = {}
        """Number, hash and fields of the open round."""

    def find_fields(self) -> None:
        """Finds what the rows of all rounds have: by config, checkpoint or sampler, or in the file of the first one.

        Raises ConfigError if the config has others than the checkpoint, or if no file comes.
        """
        dataset, saved = self._dataset, self._run.checkpointing.resume.saved
        known = saved.parts.get("rounds", {}).get("fields") if saved else None
        if known is None and self._sampler is not None:
            known = ["logprobs", "reward"]
        elif known is not None and dataset.fields not in (None, frozenset(known)):
            text = f"the checkpoint was saved with {known}; set it to them"
            raise ConfigError(Problem("dataset.fields", text, sorted(dataset.fields or ())))
        if known is not None and dataset.fields is None:
            dataset.fields = frozenset(known)
        number = min(saved.epoch + 1, self._run.settings.epochs) if saved else 1
        if dataset.fields is None and self._wait_for(number, self._wait_seconds):
            with naming("dataset"):
                dataset.fields = fields_of_first(PathRows(str(dataset.file_of(number))))

    def begin(self, epoch: int) -> None:
        """Waits for the round's file, or samples it, and opens it. At a requested stop all ranks end the run.

        Raises ConfigError if no file comes, or another one than before a resume within the round.
        """
        run, number, max_seconds = self._run, epoch + 1, self._wait_seconds
        is_resumed = self._open.get("round") == number
        if self._sampler is not None:
            if is_resumed:
                max_seconds = 0  # nobody writes it again
            else:
                self._sample(self._sampler, number)
        if run.stop.is_agreed or not self._wait_for(number, max_seconds):  # it may have waited before, for the fields
            again = how_to_resume(f"step_{run.global_step}", run.settings.resume_from_checkpoint)
            again = again if run.global_step else "nothing was trained yet"
            run.log.info(f"Stopped as requested before round {number}; {again}")
            return
        # Ranks may be nodes whose folders are not one: all must have read the same.
        content_hash = self._dataset.open(number)
        hashes, file = gather_objects(content_hash, run.ranks.cpu_group), self._dataset.file_of(number)
        if len({*hashes}) > 1:
            raise ConfigError(Problem("dataset.path", f"ranks have read other contents of {file.name}", file.parent))
        if is_resumed and self._open["content_hash"] != content_hash and not run.settings.resume_with_other_data:
            text = f"{file} has another content than when the checkpoint was saved within its round ({content_hash} "
            text += f"instead of {self._open['content_hash']}); restore the file"
            raise ConfigError(Problem("dataset.path", text, file.parent))
        self._open = {"round": number, "content_hash": content_hash, "fields": sorted(self._dataset.fields or ())}

    def _sample(self, sampler: ModelSampler, number: int) -> None:
        """Writes the file of a round with the model as it is now, unless a stop is requested."""
        run, dataset, began = self._run, self._dataset, time.perf_counter()
        groups = sampler.sample(
            self._model,
            self._tokenizer,
            run.ranks,
            number - 1,
            len(dataset),
            lambda: all_reduce_any([run.stop.is_set()], run.ranks.cpu_group)()[0],
            run.global_step,
        )
        if not groups:
            return  # the wait for the file ends at once
        seconds = time.perf_counter() - began
        file, text, problem = dataset.file_of(number), file_of(groups, run.global_step), None
        if run.ranks.is_zero:
            try:
                dataset.path.mkdir(parents=True, exist_ok=True)
                # A file of another training is kept. A killed run has written the same one.
                if file.exists() and file.read_bytes() != text.encode():
                    run.log.warn(f"{file} is of another training; it is now {file.name}.before")
                    file.replace(file.with_name(f"{file.name}.before"))
                write_atomically(dataset.path / f"round_{number:04d}.jsonl", text)
            except OSError as error:
                problem = str(error)
        if (problem := gather_objects(problem, run.ranks.cpu_group)[0]) is not None:
            raise ConfigError(Problem("dataset.path", problem, dataset.path))
        num_tokens = sum(len(answer) for group in groups for answer in group["completion_ids"])
        run.log.info(
            f"Round {number}: {num_tokens:,} tokens of {len(groups)} groups sampled in {seconds:.1f} s, "
            f"mean reward {mean_reward(groups):.3f}"
        )

    def _wait_for(self, number: int, max_seconds: float) -> bool:
        """Returns True once all ranks see the file of a round, False on all ranks at a requested stop."""
        self._run.stop.listen()
        run, began, has_logged = self._run, time.monotonic(), False
        while True:
            file = self._dataset.file_of(number)
            is_late = time.monotonic() - began >= max_seconds
            mine = [run.stop.is_set(), not file.exists(), is_late and run.ranks.is_zero]
            is_stopped, is_missing, is_late = all_reduce_any(mine, run.ranks.cpu_group)()
            if is_stopped:
                run.stop.is_agreed = True
                return False
            if not is_missing:
                return True
            if is_late:
                text = f"{file} has not come within {max_seconds:g} seconds; write it, or wait longer"
                raise ConfigError(Problem("wait_seconds", text, self._wait_seconds))
            if not has_logged:
                run.log.info(f"Waits for {file}, at most {max_seconds:g} seconds")
                has_logged = True
            time.sleep(_POLL_SECONDS)

    def state(self) -> dict[str, Any]:
        """Returns number, hash and fields of the open round."""
        return self._open

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes number, hash and fields of the round that was open."""
        self._open = dict(state)
