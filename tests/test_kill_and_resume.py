"""A training that is killed at any moment, through `tune run`, resumes as if it had not been."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from recipe_runs import tiny_config

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kill_and_resume.py"


@pytest.mark.parametrize(("nproc_per_node", "asynchronous"), [(1, False), (2, True)])
def test_losses_after_kills_are_those_of_an_undisturbed_run(
    nproc_per_node, asynchronous, weights_folder, tmp_path
):
    config = tiny_config(
        weights_folder,
        dataset={"_component_": "tiny.tiny_dataset", "num_samples": 400},
        batch_size=2,
        gradient_accumulation_steps=2,
        microbatching="packed",
        enable_async_checkpointing=asynchronous,
    )
    config["checkpointer"]["output_dir"] = "${output_dir}"
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--config", str(path), "--kills", "3",
         "--nproc_per_node", str(nproc_per_node)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert "3 kills" in last
    assert " 0 lost, 0 losses differ" in last
