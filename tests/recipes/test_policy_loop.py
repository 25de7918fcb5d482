"""The loop of the page, with any engine: a shell script that samples, trains and resumes after an interruption."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from programs import children_of
from recipe_runs import POLICY, tiny_config
from tiny_transformers import save_tiny

from recipe_utils.cli.registry import recipe_path

SAMPLER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

model, number, file = sys.argv[1:]
policy = AutoModelForCausalLM.from_pretrained(model)
torch.manual_seed(int(number))
with open(file, "w") as rows, torch.no_grad():
    for prompt in range(4):
        tokens = torch.tensor([[3, 5 + prompt]] * 4)
        log_probs = []
        for _ in range(6):
            scores = policy(tokens).logits[:, -1].log_softmax(-1)
            drawn = torch.multinomial(scores.exp(), 1)
            log_probs.append(scores.gather(1, drawn))
            tokens = torch.cat([tokens, drawn], 1)
        answers = tokens[:, 2:].tolist()
        row = {"prompt_ids": tokens[0, :2].tolist(), "completion_ids": answers,
               "logprobs": torch.cat(log_probs, 1).tolist(), "rewards": [sum(t < 60 for t in a) for a in answers]}
        rows.write(json.dumps(row) + "\\n")
"""


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_the_shell_loop_of_the_page_trains_and_resumes(weights_folder, tmp_path):
    page = recipe_path(POLICY).with_suffix(".md").read_text()
    (script,) = re.findall(r"^```bash\n(# loop.sh.*?)^```", page, re.M | re.S)
    model, out = tmp_path / "model", tmp_path / "out"
    folder = save_tiny(model, "qwen3")
    for given, own in (("/data/rounds", tmp_path / "rounds"), ("/runs/grpo", out), ("/models/Qwen3-0.6B", model)):
        script = script.replace(given, str(own))
    script = (
        script.replace("groups_per_round=64", "groups_per_round=4")
        .replace("epochs=50", "epochs=3")
        .replace("<= 50", "<= 3")
    )
    config = tiny_config(
        weights_folder, **folder, microbatching="packed", gradient_accumulation_steps=..., global_batch_size=2
    )
    config |= {
        "dataset": {"_component_": "recipe_utils.policy.rollout_dataset"},
        "loss": {"_component_": "recipe_utils.policy.PolicyLoss"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
        "output_dir": str(out),
        "max_tokens_per_microbatch": 64,
    }
    config["checkpointer"]["output_dir"] = str(out)
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "sample.py").write_text(SAMPLER)
    (tmp_path / "loop.sh").write_text(script)
    (tmp_path / "rounds").mkdir()
    environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}

    def start():
        return subprocess.Popen(["bash", "loop.sh"], cwd=tmp_path, env=environment, start_new_session=True)

    # Interrupted in the second round, and again from the start.
    loop, metrics = start(), out / "logs" / "metrics.jsonl"
    try:
        while len(lines_of(metrics)) < 3 and loop.poll() is None:
            time.sleep(0.05)
    finally:
        os.killpg(loop.pid, signal.SIGTERM)
        loop.wait(60)
    assert not children_of(loop.pid)
    assert start().wait(300) == 0
    steps = [line["step"] for line in lines_of(metrics) if "loss" in line]
    assert sorted({*steps}) == [1, 2, 3, 4, 5, 6]
    assert (out / "epoch_2" / "model.safetensors").is_file()
    assert sorted(file.name for file in (tmp_path / "rounds").iterdir()) == [f"round_000{i}.jsonl" for i in (1, 2, 3)]
    ratios = [line["ratio"] for line in lines_of(metrics) if "loss" in line]
    assert ratios[0] == pytest.approx(1, abs=1e-4)  # of the model that sampled
