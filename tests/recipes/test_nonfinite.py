"""An update step whose gradient is not finite never reaches the weights, on any rank."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from recipe_runs import STEP_OF_8, ListLogger, keep_messages, set_up, slow
from torch.distributed.tensor import DTensor

from recipe_utils.training.log import read_metrics

DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 48}


@pytest.fixture
def make_config(tiny_config):
    """Makes configs of six update steps of 8 samples."""

    def make(fused=True, **changes):
        optimizer = {"_component_": "torch.optim.AdamW", "lr": 0.01, "fused": fused}
        return tiny_config(dataset=DATA, optimizer=optimizer, **STEP_OF_8, **changes)

    return make


def everything(recipe):
    """Copies of all weights and of the optimizer's state on this rank."""
    state = recipe.stepper.optimizer.state_dict()["state"]
    tensors = [*recipe.model.module.parameters(), *(v for s in state.values() for v in s.values())]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [tensor.detach().clone() for tensor in local]


def run_with_spoilt_steps(config, spoilt, factor, reads_late=False):
    """Multiplies a loss of the last rank by ``factor`` in the update steps ``spoilt``.

    Returns the metrics or the error, the warnings, and whether each update step changed anything.
    """
    changed, to_spoil = [], []

    def spoilt_sums(microbatch):
        is_here = to_spoil and dist.get_rank() == dist.get_world_size() - 1
        return sums(microbatch) * (to_spoil.pop() if is_here else 1)

    def watched_update(step):
        to_spoil[:] = [factor] if recipe.run.global_step + 1 in spoilt else []
        before = everything(recipe)
        result = update(step)
        after = everything(recipe)
        # The first update step makes the optimizer's state, at the end of the list.
        changed.append(not all(map(torch.equal, before, after)))
        return result

    try:
        with keep_messages(logging.WARNING) as warnings, set_up(config) as recipe:
            recipe.run.metrics.late.is_late |= reads_late
            sums, update = recipe.model.sums, recipe.update
            recipe.model.sums, recipe.update = spoilt_sums, watched_update
            recipe.train()
    except RuntimeError as error:
        return str(error), warnings, changed
    return list(ListLogger.logged), warnings, changed


def run(world_size, *args):
    return run_distributed(run_with_spoilt_steps, world_size, *args)


REASON = "update step 3 had a loss or gradient that is not finite"
NAN, INF = float("nan"), float("inf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "fused", "factor", "reads_late"),
    [(1, True, NAN, True), (1, False, INF, False), (2, True, INF, False), (2, False, NAN, True), (2, True, NAN, True)],
)
def test_a_skipped_step_changes_nothing_on_any_rank(world_size, fused, factor, reads_late, make_config):
    config = make_config(fused, on_nonfinite="skip", clip_grad_norm=1.0)
    (logged, warnings, changed), *others = run(world_size, config, [3, 6], factor, reads_late)
    assert changed == [True, True, False, True, True, False]
    assert all(of_rank == changed for *_, of_rank in others)
    assert [m.get("num_nonfinite_steps", 0) for m in logged] == [0, 0, 1, 0, 0, 1]
    skipped = [text for text in warnings if "not finite; skipped" in text]
    assert ["step 3 had" in skipped[0], "step 6 had" in skipped[1], len(skipped)] == [True, True, 2]


@pytest.mark.parametrize("reads_late", [False, slow(True)], ids=["at-once", "late"])
def test_a_run_stops_with_a_checkpoint_of_unchanged_weights(reads_late, make_config):
    """If metrics are read late, it stops one update step later."""
    config = make_config()
    for error, _, changed in run(2, config, [3], NAN, reads_late):
        assert REASON in error
        assert "on_nonfinite=stop" in error
        assert changed == [True, True, False, True][: 3 + reads_late]
    logs = read_metrics(Path(config["output_dir"], "logs", "metrics.jsonl"))
    assert [line["step"] for line in logs] == [1, 2, 3, 4][: 3 + reads_late]
    resumed = {**config, "resume_from_checkpoint": True}
    (logged, _, changed), _ = run(2, resumed, [], 1.0, reads_late)
    assert [metrics["step"] for metrics in logged] == [4, 5, 6][reads_late:]
    assert all(changed)
