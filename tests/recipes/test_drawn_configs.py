"""Drawn configs train the same losses on any layout, or are refused by a key that they have.

DRAWN_SEEDS=300-600 pytest --all tests/recipes/test_drawn_configs.py    # draws others
"""

import contextlib
import io
import math
import os
import re
import shutil
import sys
import time
import traceback
from pathlib import Path

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from drawn_configs import drawn
from omegaconf import OmegaConf
from recipe_runs import ListLogger, recipe_class
from torch.distributed import TCPStore

from recipe_utils.cli.registry import SAME_FILE

FIRST, END = map(int, os.environ.get("DRAWN_SEEDS", "0-40").split("-"))
TOLERANCE = {True: 1e-8, False: 1e-4}


def run_as_users_do(recipe, path, port, mutate=None):
    """Returns exit code, last messages and metrics of this rank; its process group is the recipe's own."""
    with contextlib.suppress(RuntimeError):
        torch.distributed.barrier()  # all have connected
    torch.distributed.destroy_process_group()
    names = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": str(port)}
    os.environ.update(names)
    ListLogger.logged.clear()
    main = recipe_class(SAME_FILE.get(recipe, recipe)).train.__globals__["recipe_main"]
    with pytest.MonkeyPatch.context() as patches, tiny.float64_throughout():
        patches.setattr(sys, "argv", [recipe, "--config", path])
        if mutate:
            mutate(patches)
        screen, code = io.StringIO(), 0
        with contextlib.redirect_stderr(screen):
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                code = 1
    return code, screen.getvalue(), list(ListLogger.logged)


def train(recipe, world_size, config, mutate=None):
    """Returns metrics of a training, or its refusal by keys of the config. Raises AssertionError for all else."""
    path = f"{config['output_dir']}.yaml"
    OmegaConf.save(OmegaConf.create(config), path)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's
    ranks = run_distributed(run_as_users_do, world_size, recipe, path, store.port, mutate)
    codes, screens, logged = zip(*ranks, strict=True)
    if not any(codes):
        return logged[0], None
    text = "\n".join(screens)
    refused = re.search(r"problems? in the config:\n((?:  - .*\n?)+)", text)
    assert {*codes} == {2}, f"exit codes {codes}: {text[-4000:]}"
    assert refused, f"no refusal: {text[-4000:]}"
    assert "Traceback" not in text, text[-4000:]
    keys = {*re.findall(r"^  - (\w+)", refused[1], re.M)}
    assert keys <= config.keys(), f"not in the config: {keys - config.keys()} of {refused[1]}"
    return None, refused[1]


def largest_difference(found, expected):
    """Returns the largest relative difference of metrics that no layout changes, by update step."""
    logged = {(m["step"], "loss" in m): m for m in expected}
    differences = [0.0]
    for metrics in found:
        other = logged[metrics["step"], "loss" in metrics]
        for name in metrics.keys() & other.keys():
            if not re.search("second|padding|spanning|effective", name):
                a, b = float(metrics[name]), float(other[name])
                is_equal = a == b or (math.isnan(a) and math.isnan(b))
                differences.append(0.0 if is_equal else abs(a - b) / max(abs(b), 1e-3))
    return max(differences, key=lambda each: math.inf if math.isnan(each) else each)


def outcome_of(seed, weights_folder, folder, models, mutate=None):
    """Returns how a drawn training ended: its largest difference from the reference, or its refusal."""
    recipe, reference, (world_size, config), resumed = drawn(seed, weights_folder, folder, models)
    print(f"seed {seed}: {recipe} on {world_size} ranks")
    print(OmegaConf.to_yaml(OmegaConf.create(config)))
    logged, refusal = train(recipe, world_size, config, mutate)
    if refusal:
        return refusal
    expected, refusal = train(recipe, 1, reference)
    assert not refusal, f"refused on one rank: {refusal}"
    steps = [[m["step"] for m in each if "loss" in m] for each in (logged, expected)]
    assert steps[0] == steps[1], f"steps {steps}"
    difference = largest_difference(logged, expected)
    tolerance = TOLERANCE[config.get("dtype") == "fp64" and "path" not in config["model"]]
    assert difference < tolerance, f"difference {difference}, tolerance {tolerance}:\n{logged}\n{expected}"
    if resumed and Path(config["output_dir"], "step_2").exists():
        world_size, config = resumed
        print(f"resumed on {world_size} ranks")
        print(OmegaConf.to_yaml(OmegaConf.create(config)))
        shutil.copytree(folder / "first/step_2", folder / "resumed/step_2")
        logged, refusal = train(recipe, world_size, config)
        if not refusal:
            after = largest_difference([m for m in logged if m["step"] > 2], expected)
            assert after < tolerance, f"difference after the resume {after}:\n{logged}\n{expected}"
            return f"{max(difference, after):.1e} resumed"
        return f"{difference:.1e} and then {refusal}"
    return f"{difference:.1e}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns a folder of models of transformers."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, END))
def test_a_drawn_config_trains_equal_losses_or_is_refused_by_its_keys(seed, weights_folder, tmp_path, models):
    start = time.monotonic()
    how = "WRONG"
    try:
        how = outcome_of(seed, weights_folder, tmp_path, models)
    finally:
        if "DRAWN_LOG" in os.environ:
            with open(os.environ["DRAWN_LOG"], "a") as log:
                log.write(f"{seed}\t{time.monotonic() - start:.1f}\t{how!r}\n")
