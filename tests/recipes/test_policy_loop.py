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

STATES = """
import os, time
from pathlib import Path

def stay(state):
    '''Waits until the test has interrupted the loop, if this is the state and the round in which it does.'''
    if os.environ["STATE"] == state and len([*Path("rounds").glob("*.jsonl")]) >= int(os.environ["NUM_ROUNDS"]):
        Path("pid.tmp").write_text(str(os.getpid()))
        Path("pid.tmp").rename("pid")
        while Path("pid").exists():
            time.sleep(0.01)
"""
SAMPLER = """
import json, random, sys
from pathlib import Path
from states import stay

model, number, file = sys.argv[1:]
prompts, answer, log_probs = [[3, 5 + prompt] for prompt in range(4)], [9, 8, 7, 6], [[-5.5] * 4] * 4
assert Path(model, "model.safetensors").stat().st_size
if number == "1":  # with the model itself; later ones cost no imports
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([[*prompt, *answer] for prompt in prompts])
    with torch.no_grad():
        scores = AutoModelForCausalLM.from_pretrained(model)(tokens).logits[:, 1:-1].log_softmax(-1)
    log_probs = scores.gather(-1, tokens[:, 2:, None])[..., 0].tolist()
with open(file, "w") as rows:
    for prompt, of_one in zip(prompts, log_probs):
        rewards = [random.Random(f"{number} {prompt} {each}").random() for each in range(4)]
        row = {"prompt_ids": prompt, "completion_ids": [answer] * 4, "logprobs": [of_one] * 4, "rewards": rewards}
        rows.write(json.dumps(row) + "\\n")
        rows.flush()
        stay("sampling")  # a part of the file is written
"""
COMPONENTS = """
import torch
from recipe_utils.checkpoint import FolderCheckpointer
from states import stay

class AdamW(torch.optim.AdamW):
    def step(self, *args):
        stay("training")
        return super().step(*args)

class Checkpointer(FolderCheckpointer):
    def save_checkpoint(self, *args, **given):
        super().save_checkpoint(*args, **given)
        stay("exporting")
"""
# State, who gets which signal (the shell, the process that is in the state, all), and the shell's exit code.
INTERRUPTIONS = [
    ("sampling", "loop", signal.SIGTERM, -signal.SIGTERM),
    ("sampling", "one", signal.SIGKILL, 128 + signal.SIGKILL),
    ("training", "all", signal.SIGINT, -signal.SIGINT),
    ("training", "one", signal.SIGKILL, 128 + signal.SIGKILL),
    ("exporting", "all", signal.SIGKILL, -signal.SIGKILL),
    ("exported", "all", signal.SIGKILL, -signal.SIGKILL),
]


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_the_shell_loop_of_the_page_resumes_from_each_state_with_one_export(weights_folder, tmp_path, started):
    page = recipe_path(POLICY).with_suffix(".md").read_text()
    (script,) = re.findall(r"^```bash\n(# loop.sh.*?)^```", page, re.M | re.S)
    model, out, num_rounds = tmp_path / "model", tmp_path / "out", len(INTERRUPTIONS) + 1
    folder = save_tiny(model, "qwen3")
    changes = {
        "/data/rounds": str(tmp_path / "rounds"),
        "/runs/grpo": str(out),
        "/models/Qwen3-0.6B": str(model),
        "groups_per_round=64": "groups_per_round=4",
        "epochs=50": f"epochs={num_rounds}",
        "<= 50": f"<= {num_rounds}",
    }
    for given, own in changes.items():
        script = script.replace(given, own)
    config = tiny_config(
        weights_folder, **folder, microbatching="packed", gradient_accumulation_steps=..., global_batch_size=2
    )
    config |= {
        "dataset": {"_component_": "recipe_utils.policy.rollout_dataset"},
        "loss": {"_component_": "recipe_utils.policy.PolicyLoss"},
        "optimizer": {"_component_": "components.AdamW", "lr": 0.01},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
        "output_dir": str(out),
        "max_tokens_per_microbatch": 64,
        "keep_last_n_exports": 1,
    }
    config["checkpointer"] |= {"_component_": "components.Checkpointer", "output_dir": str(out)}
    files = {"states.py": STATES, "components.py": COMPONENTS, "sample.py": SAMPLER, "loop.sh": script}
    for name, text in {**files, "grpo.yaml": yaml.safe_dump(config)}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "rounds").mkdir()
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"

    def start(state, num_files):
        environment = {**os.environ, "PATH": path, "STATE": state, "NUM_ROUNDS": str(num_files)}
        loop = subprocess.Popen(["bash", "loop.sh"], cwd=tmp_path, env=environment, start_new_session=True)
        started.append(loop)
        return loop

    for number, (state, receiver, signal_number, code) in enumerate(INTERRUPTIONS, start=1):
        loop = start(state, number)
        # Between an export and its checkpoint no process stays: the kill comes as soon as the export is seen.
        is_reached = out / f"epoch_{number - 1}" if state == "exported" else tmp_path / "pid"
        while not is_reached.exists():
            assert loop.poll() is None, f"it ended before {state}"
            time.sleep(0.001)
        processes = {loop.pid, *children_of(loop.pid)}
        pid = int((tmp_path / "pid").read_text()) if receiver == "one" else loop.pid
        (os.killpg if receiver == "all" else os.kill)(pid, signal_number)
        (tmp_path / "pid").unlink(missing_ok=True)
        assert loop.wait(120) == code, (state, receiver)
        (tmp_path / "pid").unlink(missing_ok=True)  # the sampler may have written another row
        # The shell waits for the others, unless it is killed, too.
        deadline = time.monotonic() + 20 * (receiver == "all")
        while left := [each for each in processes if os.path.exists(f"/proc/{each}/exe")]:
            assert time.monotonic() < deadline, (state, receiver, left)
    assert start("", 0).wait(300) == 0
    logged = [line for line in lines_of(out / "logs" / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in logged] == [*range(1, 2 * num_rounds + 1)]
    assert logged[0]["ratio"] == pytest.approx(1, abs=1e-4)  # of the model that sampled
    assert [path.name for path in out.glob("epoch_*")] == [f"epoch_{num_rounds - 1}"]
    assert (out / f"epoch_{num_rounds - 1}" / "model.safetensors").is_file()
    names = [f"round_{number:04d}.jsonl" for number in range(1, num_rounds + 1)]
    assert sorted(file.name for file in (tmp_path / "rounds").iterdir()) == names
