"""Overrides of the command line that torchtune's parser cannot merge."""

import sys

import pytest
from omegaconf import OmegaConf
from programs import tune

from recipe_utils.settings.problems import ConfigError
from recipe_utils.training.command import entry_point, with_overrides

MIXTURE = {"dataset": [{"name": "a", "weight": 1.0}, {"name": "b"}], "lr": {"0": 1}, "seed": 1}


def test_a_key_of_an_entry_of_a_list_is_set_with_its_type():
    cfg = OmegaConf.create(MIXTURE)
    words = ["dataset.0.weight=0.4", "dataset.1.loss_weight=2", "dataset.1.subset=null", "lr.0=2"]
    changed = OmegaConf.to_container(with_overrides(cfg, words))
    assert changed["dataset"] == [{"name": "a", "weight": 0.4}, {"name": "b", "loss_weight": 2, "subset": None}]
    assert changed["lr"] == {"0": 2}
    assert cfg == MIXTURE


def test_an_entry_that_the_config_does_not_have_is_refused():
    with pytest.raises(ConfigError) as error:
        with_overrides(OmegaConf.create(MIXTURE), ["dataset.2.weight=1", "seed.0=1", "none.0.x=1"])
    text = str(error.value)
    assert "dataset.2.weight=1: dataset has 2 entries, from dataset.0" in text
    assert "seed.0=1: seed is no list in the config" in text
    assert "none.0.x=1: none is no list in the config" in text


def test_a_component_on_the_command_line_is_a_mapping(tmp_path, monkeypatch):
    """It replaces the config's, or a list, with its arguments; later words set arguments of the new one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(
        "dataset: {_component_: old.data, split: train}\nloss: {_component_: old.loss}\n"
        "tokenizer: {_component_: old.tokenizer, path: a}\noptimizer: {_component_: old.optimizer, lr: 1}\n"
    )
    words = ["dataset={_component_: my.data, path: 'a=b'}", "dataset.max_len=3", "loss=[{_component_: my.loss}]"]
    words += ["loss.0.weight=2", "tokenizer=my.tokenizer", "optimizer.lr=2", "lr_scheduler={_component_: my.schedule}"]
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--config", "my.yaml", *words])
    read = []
    with pytest.raises(SystemExit) as end:
        entry_point(lambda cfg: read.append(OmegaConf.to_container(cfg)))()
    assert not end.value.code
    assert read == [
        {
            "dataset": {"_component_": "my.data", "path": "a=b", "max_len": 3},
            "loss": [{"_component_": "my.loss", "weight": 2}],
            "tokenizer": {"_component_": "my.tokenizer", "path": "a"},
            "optimizer": {"_component_": "old.optimizer", "lr": 2},
            "lr_scheduler": {"_component_": "my.schedule"},
        }
    ]


def test_a_component_that_is_no_yaml_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my.yaml").write_text("dataset: {_component_: old.data}\n")
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--config", f"{tmp_path}/my.yaml", "dataset={_component_: a, b"])
    with pytest.raises(SystemExit) as end:
        entry_point(lambda cfg: None)()
    assert end.value.code == 2
    assert "command line or YAML" in capsys.readouterr().err


CRASHES = """
import faulthandler
import os
import threading

from recipe_utils.training.command import entry_point


def in_a_thread():
    if os.environ["RANK"] == "0":
        END


def recipe_main(cfg):
    threading.Thread(target=in_a_thread).start()
    threading.Event().wait(60)


if __name__ == "__main__":
    entry_point(recipe_main)()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crash", "name"),
    [("os.abort()", "Aborted"), ("faulthandler._sigsegv()", "Segmentation fault")],
    ids=["abort", "segfault"],
)
def test_a_rank_that_crashes_prints_the_stacks_of_all_its_threads(crash, name, tmp_path):
    recipe, cfg = tmp_path / "my_recipe.py", tmp_path / "my.yaml"
    recipe.write_text(CRASHES.replace("END", crash))
    cfg.write_text(f"output_dir: {tmp_path}/out\n")
    end = tune("run", "--nproc_per_node", "2", recipe, "--config", cfg)
    assert end.returncode
    assert f"Fatal Python error: {name}" in end.stderr
    assert "in in_a_thread" in end.stderr
    assert "in recipe_main" in end.stderr


LEAVES_A_TENSOR_TO_GLOO = """
import atexit
import threading
import time

import torch
import torch.distributed as dist

from recipe_utils.training.command import entry_point


class FreedSlowly:
    def __del__(self):
        time.sleep(1)


def later():
    time.sleep(0.2)
    print("the thread has ended")


def recipe_main(cfg):
    dist.init_process_group("gloo")
    global group
    group = dist.new_group(backend="gloo")  # outlives the default group
    tensor = torch.ones(9)
    tensor.note = FreedSlowly()
    dist.all_reduce(tensor, group=group, async_op=True)
    del tensor
    dist.destroy_process_group()
    atexit.register(print, "at exit", end="")
    threading.Thread(target=later).start()


if __name__ == "__main__":
    entry_point(recipe_main)()
"""


@pytest.mark.slow
def test_a_rank_ends_well_although_a_thread_of_gloo_still_frees_tensors(tmp_path):
    recipe, cfg = tmp_path / "my_recipe.py", tmp_path / "my.yaml"
    recipe.write_text(LEAVES_A_TENSOR_TO_GLOO)
    cfg.write_text(f"output_dir: {tmp_path}/out\n")
    end = tune("run", "--nproc_per_node", "2", recipe, "--config", cfg)
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("the thread has ended") == end.stdout.count("at exit") == 2
