"""Runs a baseline: ``python -m recipe_utils.benchmark.baselines.worker SPEC PIPE``.

``SPEC`` is a file of :func:`write_spec`, ``PIPE`` the inherited descriptor of a connection to the benchmark.
"""

import ctypes
import json
import signal
import sys
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from recipe_utils.benchmark.baselines.kinds import KINDS
from recipe_utils.benchmark.interleave import Gate
from recipe_utils.benchmark.lineup import Baseline
from recipe_utils.benchmark.token_audit import FedTokens


def write_spec(path: Path, baseline: Baseline, pad_id: int) -> Path:
    """Writes what a worker trains."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spec: dict[str, Any] = {name: getattr(baseline, name) for name in ("recipe", "recipe_file", "kind", "config")}
    path.write_text(json.dumps({**spec, "pad_id": pad_id}, indent=1))
    return path


def main() -> None:
    """Waits for the first turn and runs until the benchmark ends the process."""
    if sys.platform == "linux":  # which kills this process when the benchmark ends, even while it is stopped
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <sys/prctl.h>
    sys.path.append(str(Path.cwd()))  # as `tune run` does, for the user's modules there
    spec = json.loads(Path(sys.argv[1]).read_text())
    pipe = Connection(int(sys.argv[2]))
    config = OmegaConf.create(spec["config"])
    module, function = KINDS[spec["recipe"]][spec["kind"]].split(".")
    # Imports before the first turn.
    train = getattr(import_module(f"recipe_utils.benchmark.baselines.{module}"), function)
    fed_tokens = FedTokens(spec["pad_id"])
    gate = Gate(pipe, fed_tokens, torch.device(config.device))
    gate.wait_for_turn()
    fed_tokens.install()
    gate.install()
    train(config, *[spec["recipe_file"]] * (spec["kind"] == "update_step"))
    raise RuntimeError("the training ended before the benchmark")


if __name__ == "__main__":
    main()
