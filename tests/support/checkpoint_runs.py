"""Trainings that save and load step checkpoints, in this process or on ranks of their own."""

import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from distributed_runs import fork_context
from recipe_runs import writing_to
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_utils.checkpoint.folder import MARKER, check_checksums, read_marker
from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.checkpoint.save import CheckpointWriter
from recipe_utils.optim.optimizer import OptimizerInBackward, single_optimizers
from recipe_utils.parallel.fsdp import shard_model
from recipe_utils.parallel.process_group import new_cpu_group
from recipe_utils.parallel.ranks import ParallelDims, build_mesh

RECIPE = "tiny"
MAKE_OPTIMIZER = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
}


def build(
    optimizer: str = "adamw",
    replicate: int = 1,
    shard: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    extra_numel: int = 3,
) -> tuple[nn.Module, Any]:
    """Returns the tiny model and one more parameter, which 4 ranks cannot share evenly."""
    model = tiny.tiny_model(seed=seed).to(dtype)
    model.register_parameter("extra", nn.Parameter(torch.full((extra_numel,), float(seed))))
    if replicate * shard > 1:
        mesh = build_mesh(torch.device("cpu"), ParallelDims(replicate, shard, 1))
        sharding = {"custom_sharded_layers": None, "cpu_offload": False}
        shard_model(model, mesh, reshard_after_forward=False, **sharding)
    if optimizer == "in_backward":
        return model, OptimizerInBackward(model, MAKE_OPTIMIZER["adamw"])
    return model, MAKE_OPTIMIZER[optimizer](model.parameters())


def train(model: nn.Module, optimizer: Any, steps: Any) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(tiny.VOCAB_SIZE, (2, 9), generator=generator)
        model(tokens).float().logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def contents(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Returns all values that training changes, in full, by parameter name."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = _full(parameter)
        for part in single_optimizers(optimizer):
            for key, value in part.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = _full(value)
            for group in part.param_groups:
                if any(member is parameter for member in group["params"]):
                    found[f"{name}/options"] = {k: v for k, v in group.items() if k != "params"}
    return found


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
        else:
            assert value == expected[name], name


def state(step: int, **changes: Any) -> TrainingState:
    values: dict[str, Any] = {
        "recipe": RECIPE,
        "global_step": step,
        "epoch": 0,
        "samples_consumed": 4 * step,
        "seed": 7,
        "data_fingerprint": {"dataset_length": 32, "shuffle": True},
        "config": {"batch_size": 4, "optimizer": {"lr": 0.1 + 0.2}},
    }
    return TrainingState(**{**values, **changes})


def save_once(folder: Path, step: int = 1, optimizer: str = "adamw") -> tuple[nn.Module, Any]:
    """Returns a checkpoint of a training of ``step`` update steps, from this process alone."""
    model, optim = build(optimizer)
    train(model, optim, range(step))
    assert CheckpointWriter(folder).save(model, optim, state(step)).error is None
    return model, optim


def change_marker(path: Path, **changes: Any) -> None:
    marker = json.loads((path / MARKER).read_text())
    (path / MARKER).write_text(json.dumps({**marker, **changes}))


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def resuming_in(folder: Path | str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a run that resumes from the checkpoints in ``folder``."""
    return {**writing_to(folder, config), "resume_from_checkpoint": True}


def files_of(path: Path) -> dict[str, bytes]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def assert_whole(path: Path) -> None:
    assert check_checksums(path, read_marker(path).files) is None


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


FILE_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def die_at(operation: int, events: Collection[str] = FILE_OPERATIONS) -> None:
    """Kills this process right before its n-th file operation from now on."""
    seen = itertools.count(1)

    def die(event: str, _: Any) -> None:
        if event in events and next(seen) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)


def killed_before_each_operation(target: Any, folder: Path) -> Iterator[Path]:
    """Runs ``target(n, folder / n)`` in processes until none dies at its n-th operation. Yields the folders."""
    for operation in range(1, 100):
        own = folder / str(operation)
        process = fork_context.Process(target=target, args=(operation, own))
        process.start()
        process.join(60)
        yield own
        if process.exitcode == 0:
            return
        assert process.exitcode == -signal.SIGKILL
    raise AssertionError("it has 100 operations")


def save_and_die_at(operation: int, folder: Path) -> None:
    """Kills this process right before its n-th file operation of saving step 2 over step 1."""
    model, optimizer = build()
    train(model, optimizer, range(1))
    writer = CheckpointWriter(folder, keep_last_n=1)
    writer.save(model, optimizer, state(1))
    train(model, optimizer, range(1, 2))
    die_at(operation)
    writer.save(model, optimizer, state(2))


def save_until_killed(folder: Path, delay_seconds: float, killed_rank: int) -> str | None:
    """Saves in the background until a rank is killed. Returns the error of the others."""
    model, optimizer = build(shard=dist.get_world_size(), extra_numel=1 << 20)
    writer = CheckpointWriter(folder, keep_last_n=1, group=new_cpu_group(20), asynchronous=True)
    writer.save(model, optimizer, state(1))
    writer.wait()
    if dist.get_rank() == killed_rank:
        threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in itertools.count(2):
        train(model, optimizer, [step])
        writer.save(model, optimizer, state(step))
        outcome = writer.wait()
        if outcome is not None and outcome.error is not None:
            return outcome.error
    return None
