"""`tune ls`, `tune cp`, `tune validate` and `tune run` in processes of their own."""

import re

import pytest
import yaml
from omegaconf import OmegaConf
from programs import lines_on, tune, tune_run_here
from recipe_runs import SFT
from recipe_runs import tiny_config as make_tiny_config

from recipe_utils.training.log import read_metrics

LORA = "lora_finetune_update_step"
CONFIGS = {SFT: "llama3_2/5M_full_update_step", LORA: "llama3_2/5M_lora_update_step"}


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / "logs" / "metrics.jsonl")]


@pytest.fixture(scope="module")
def by_name(weights_folder, tmp_path_factory):
    """Returns a folder with a config of 3 update steps of 4 samples, and its losses in `out`."""
    folder = tmp_path_factory.mktemp("by_name")
    config = make_tiny_config(
        weights_folder,
        max_steps_per_epoch=3,
        metric_logger={"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "${output_dir}/logs"},
        output_dir=f"{folder}/out",
    )
    config["checkpointer"]["output_dir"] = "${output_dir}"
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    code, screen = tune_run_here(SFT, "my.yaml", cwd=folder)
    assert code == 0, screen
    assert len(losses(folder / "out")) == 3
    return folder


def test_ls_lists_the_recipes_and_their_configs(tmp_path):
    listed = tune("ls", cwd=tmp_path).stdout
    for name, config in CONFIGS.items():
        assert re.search(rf"^{name} +{config}", listed, re.M), "one without a download comes first"
    assert "full_finetune_single_device" in listed


@pytest.mark.slow
def test_a_similar_name_is_suggested(tmp_path):
    done = tune("run", SFT[:-1], "--config", f"{CONFIGS[SFT]}s", cwd=tmp_path)
    assert done.returncode != 0
    for name, given in ((SFT, SFT[:-1]), (CONFIGS[SFT], f"{CONFIGS[SFT]}s")):
        assert f"{given}: unknown; did you mean {name}?" in done.stderr


@pytest.mark.slow
def test_validate_finds_a_config_by_name(tmp_path):
    assert "well-formed" in tune("validate", CONFIGS[LORA], cwd=tmp_path).stdout


def test_two_processes_log_the_losses_of_one(by_name):
    batch = ["global_batch_size=4", "~gradient_accumulation_steps"]
    arguments = [SFT, "--config", "my.yaml", *batch, f"output_dir={by_name}/two"]
    two = tune("run", "--nproc_per_node", 2, *arguments, cwd=by_name)
    assert two.returncode == 0, two.stderr
    assert losses(by_name / "two") == pytest.approx(losses(by_name / "out"), rel=1e-5)
    assert two.stderr.count("100%") <= 3, "more than one rank shows a bar"
    assert "torchao" not in two.stdout + two.stderr
    assert "Enum" not in two.stdout + two.stderr


@pytest.mark.slow
def test_a_copy_of_the_recipe_gives_the_same_losses_without_a_progress_bar(by_name, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert tune("cp", SFT, "my_recipe.py", cwd=by_name).returncode == 0
    output_dir = f"output_dir={by_name}/copy"
    done = tune("run", "my_recipe.py", "--config", "my.yaml", output_dir, cwd=by_name)
    screen = done.stdout + done.stderr
    assert done.returncode == 0, screen
    assert losses(by_name / "copy") == losses(by_name / "out")
    assert "3 update steps, " in screen
    assert "%|" not in screen
    assert "torchao" not in screen


OF_LAST_STAGE = {"pipeline_parallel_dim": 2, "custom_sharded_layers": ["tok_embeddings"]}
WEIGHTED = {"tokens": [1, 2], "labels": [1, 2], "weights": [2, 2]}
OF_RANK_ZERO = {"dataset": {"replace": {"5": WEIGHTED}}, "loss": {"_component_": "torch.nn.CrossEntropyLoss"}}
BAD = {"shuffle": False, "dataset": {"replace": {"9": {"tokens": [1, 900], "labels": [1, 1]}}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "code", "texts"),
    [
        (
            {"batchsize": 3, "clip_grad_norm": 0},
            2,
            [
                "  - batchsize: this recipe has no such key; did you mean batch_size?",
                "  - clip_grad_norm=0: it must be above 0",
            ],
        ),
        (BAD, 1, ["error: sample 9 of dataset: token 900 is outside"]),
        (OF_LAST_STAGE, 2, ["  - custom_sharded_layers=['tok_embeddings']: this model's output layer shares"]),
        (
            OF_RANK_ZERO,
            2,
            ["  - dataset: sample 5 of dataset: its 'weights' contains 2, which this loss does not take"],
        ),
    ],
    ids=["config", "sample", "of the last stage", "of rank 0"],
)
def test_ranks_report_an_error_once_and_last_without_a_traceback(changes, code, texts, by_name):
    config = OmegaConf.merge(OmegaConf.load(by_name / "my.yaml"), changes)
    OmegaConf.save(config, by_name / "bad.yaml")
    done = tune("run", "--nproc_per_node", 2, SFT, "--config", "bad.yaml", f"output_dir=bad_{code}", cwd=by_name)
    assert done.returncode == code
    screen = done.stdout + done.stderr
    assert [screen.count(text) for text in texts] == [1] * len(texts)
    assert lines_on(screen)[-1].startswith(texts[-1])
    assert "Traceback" not in screen
    assert "elastic" not in screen
    assert "another rank" not in screen
    assert not list(by_name.glob("bad_2/epoch_*"))
