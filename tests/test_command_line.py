"""The recipe as users start it: `tune ls`, `tune cp`, `tune validate` and `tune run`.

Some of these processes are warm, see warm_tune.py; the tests whose docstrings say "Cold" start real ones.
"""

import re
from pathlib import Path

import pytest
import yaml
from recipe_runs import tiny_config as make_tiny_config
from warm_tune import cold_tune, tune

NAME = "full_finetune_update_step"
DEFAULT = "llama3_2/5M_full_update_step"
LORA_NAME = "lora_finetune_update_step"
LORA_DEFAULT = "llama3_2/5M_lora_update_step"


def logged_losses(folder):
    text = "".join(path.read_text() for path in Path(folder).glob("logs/*.txt"))
    return [float(loss) for loss in re.findall(r"\| loss:([\d.]+)", text)]


@pytest.fixture(scope="module")
def by_name(weights_folder, tmp_path_factory):
    """A folder with a config of 3 update steps of 4 samples and what `tune run` by name made of it."""
    folder = tmp_path_factory.mktemp("by_name")
    config = make_tiny_config(weights_folder, max_steps_per_epoch=3)
    config["metric_logger"] = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${output_dir}/logs",
    }
    config["output_dir"] = config["checkpointer"]["output_dir"] = f"{folder}/out"
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    done = tune("run", NAME, "--config", "my.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(logged_losses(folder / "out")) == 3
    return folder


def test_ls_lists_the_recipes_and_their_configs(tmp_path):
    """Cold: how `import torch` calls the registration, in this test as in the next two."""
    listed = cold_tune("ls", cwd=tmp_path).stdout
    for name, default in ((NAME, DEFAULT), (LORA_NAME, LORA_DEFAULT)):
        assert re.search(rf"^{name} +{default}", listed, re.M)
    assert "full_finetune_single_device" in listed


def test_validate_knows_configs_by_name_and_by_path(tmp_path):
    """Cold, the first."""
    assert "well-formed" in cold_tune("validate", DEFAULT, cwd=tmp_path).stdout
    tune("cp", DEFAULT, "copy.yaml", cwd=tmp_path)
    assert "well-formed" in tune("validate", "copy.yaml", cwd=tmp_path).stdout
    assert "well-formed" in tune("validate", LORA_DEFAULT, cwd=tmp_path).stdout


def test_two_names_of_a_recipe_give_the_same_copy(tmp_path):
    """Cold, one of the two."""
    for name, run in ((NAME, cold_tune), (LORA_NAME, tune)):
        assert run("cp", name, f"{name}.py", cwd=tmp_path).returncode == 0
    copies = [(tmp_path / f"{name}.py").read_text() for name in (NAME, LORA_NAME)]
    assert copies[0] == copies[1]


def test_run_by_name_and_from_a_copy_give_the_same_losses(by_name):
    assert tune("cp", NAME, "my_recipe.py", cwd=by_name).returncode == 0
    output_dir = f"output_dir={by_name}/copy"
    from_copy = tune("run", "my_recipe.py", "--config", "my.yaml", output_dir, cwd=by_name)
    assert from_copy.returncode == 0, from_copy.stderr
    assert logged_losses(by_name / "copy") == logged_losses(by_name / "out")


def test_two_processes_log_the_losses_of_one(by_name):
    """Cold: ranks that torchrun starts by `exec`."""
    batch = ["global_batch_size=4", "~gradient_accumulation_steps"]
    output_dir = f"output_dir={by_name}/two"
    two = cold_tune(
        "run", "--nproc_per_node", "2", NAME, "--config", "my.yaml", *batch, output_dir, cwd=by_name
    )
    assert two.returncode == 0, two.stderr
    losses = logged_losses(by_name / "two")
    assert len(losses) == 3
    assert losses == pytest.approx(logged_losses(by_name / "out"), rel=1e-5)
    assert two.stderr.count("100%") <= 3, "more than one rank shows a bar"


def test_a_warm_run_gives_the_losses_of_a_cold_one(by_name):
    """Cold, one of the two: what stands for the real command everywhere else is its equal."""
    arguments = ("run", NAME, "--config", "my.yaml", f"output_dir={by_name}/cold")
    cold = cold_tune(*arguments, cwd=by_name)
    assert cold.returncode == 0, cold.stderr
    assert logged_losses(by_name / "cold") == logged_losses(by_name / "out")


def test_a_warm_run_refuses_a_config_with_the_words_of_a_cold_one(by_name):
    """Cold, one of the two."""
    arguments = ("run", NAME, "--config", "my.yaml", "output_dir=refused", "batchsize=3")
    warm, cold = (run(*arguments, cwd=by_name) for run in (tune, cold_tune))
    assert warm.returncode == cold.returncode == 2
    last_lines = [done.stderr.splitlines()[-40:] for done in (warm, cold)]
    assert last_lines[0] == last_lines[1]
    assert "did you mean batch_size?" in last_lines[0][-1]


def test_a_missing_config_is_said_so(tmp_path):
    done = tune("run", NAME, cwd=tmp_path)
    assert done.returncode == 2
    assert "The '--config' argument is required" in done.stderr


def test_a_config_that_cannot_work_is_said_once_without_a_traceback(by_name, tmp_path):
    done = tune(
        "run", "--nproc_per_node", "2", NAME, "--config", f"{by_name}/my.yaml", "output_dir=out",
        "batchsize=3", "optimizer.lr=fast", "clip_grad_norm=0", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert said.count("3 problems in the config:") == 1
    for problem in (
        "batchsize: this recipe has no such key; did you mean batch_size?",
        "optimizer.lr='fast': AdamW takes float | torch.Tensor",
        "clip_grad_norm=0: it must be above 0",
    ):
        assert said.count(f"  - {problem}\n") == 1
    assert "Traceback" not in said
    assert not list(tmp_path.glob("out/*"))


def test_a_mistake_inside_a_component_of_the_users_own_keeps_its_traceback(by_name, tmp_path):
    (tmp_path / "mine.py").write_text("def tokenizer(max_seq_len=8):\n    return 1 + '1'\n")
    done = tune(
        "run", NAME, "--config", f"{by_name}/my.yaml", "output_dir=out", "tokenizer=mine.tokenizer",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "return 1 + '1'" in done.stderr
    assert "TypeError" in done.stderr
    assert "raised while tokenizer of the config was made" in done.stderr
