"""Runs a recipe file in this process and returns what it logged."""

import logging
import re
import runpy
import sys
import zlib
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import tiny
import torch
import torchtune
from omegaconf import OmegaConf
from torchtune.modules.peft import get_adapter_params
from torchtune.training.metric_logging import MetricLoggerInterface

from recipe_utils.benchmark.baselines.stock import let_stock_recipe_run_on_cpu
from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.cli.registry import recipe_path
from recipe_utils.optim.optimizer import trained_parameters
from recipe_utils.parallel.fsdp import local
from recipe_utils.settings.describe import load_recipe
from recipe_utils.settings.problems import ConfigError
from recipe_utils.torchtune_names import LOGGERS

WEIGHTS = {
    "weights.pt": tiny.MODEL,
    "untied.pt": tiny.UNTIED_MODEL,
    "deep.pt": tiny.DEEP_MODEL,
    "deep_untied.pt": tiny.DEEP_UNTIED_MODEL,
    "wide.pt": tiny.WIDE_MODEL,
    "wide_untied.pt": tiny.WIDE_UNTIED_MODEL,
    "teacher.pt": tiny.TEACHER_MODEL,
    "untied_teacher.pt": tiny.UNTIED_TEACHER_MODEL,
    "gemma2.pt": tiny.GEMMA2_MODEL,
    "four_keys.pt": {**tiny.MODEL, "num_kv_heads": 4},
    "one_key.pt": {**tiny.MODEL, "num_kv_heads": 1},
}
SFT, DPO = "full_finetune_update_step", "full_dpo_update_step"
KD, DINO = "knowledge_distillation_update_step", "dinov3_update_step"
POLICY = "full_policy_update_step"


# The momentum gives the optimizer a state: without one, PyTorch takes an extra step with zero gradients
# before it saves one.
RECORDING_SGD = {"_component_": "tiny.RecordingSGD", "lr": 0.0, "momentum": 0.9}
STEP_OF_8 = {"batch_size": 2, "global_batch_size": 8, "gradient_accumulation_steps": ...}
STOCK_LOSS = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
STOCK_KEYS = {
    "epochs": 1,
    "max_steps_per_epoch": None,
    "resume_from_checkpoint": False,
    "lr_scheduler": None,
    "enable_activation_checkpointing": False,
    "enable_activation_offloading": False,
    "optimizer_in_bwd": False,
    "compile": False,
    "save_adapter_weights_only": False,
    "profiler": None,
}
"""Keys that torchtune's recipes require."""


def slow(*values):
    """Returns a case of a parametrized test that runs with ``--all`` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def cosine(num_warmup_steps):
    """Returns the schedule that most of torchtune's configs have."""
    component = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    return {"_component_": component, "num_warmup_steps": num_warmup_steps}


class ListLogger(MetricLoggerInterface):
    """Keeps metrics in a list that outlives the recipe."""

    logged: list[dict[str, Any]] = []  # noqa: RUF012

    def log(self, name, data, step):
        self.log_dict({name: data}, step)

    def log_config(self, config):
        pass

    def log_dict(self, payload, step):
        ListLogger.logged.append({"step": step, **payload})

    def close(self):
        pass


def losses(logged):
    """Returns losses of update steps, without validations between them; torchtune logs tensors."""
    return [float(metrics["loss"]) for metrics in logged if "loss" in metrics]


def recipe_class(recipe=SFT):
    """Returns the recipe's class, the same at each call, so that mutants patch the module that is run."""
    return _load(recipe)


@cache  # by itself it tells recipe_class(SFT) from recipe_class(recipe=SFT)
def _load(recipe):
    return load_recipe(recipe)[1]


def changed_recipe(folder, changes, recipe=SFT):
    """Returns the path of a copy of a recipe in which each key of ``changes``, found once, has become its value."""
    text = recipe_path(recipe).read_text()
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = folder / "my_recipe.py"
    path.write_text(text)
    return str(path)


def section_of(page, heading):
    """Returns the text of a page from a heading to the next of its level or above."""
    level = heading.partition(" ")[0]
    return re.search(rf"^{re.escape(heading)}.*?(?=^#{{1,{len(level)}}} |\Z)", page.read_text(), re.M | re.S)[0]


def recipe_of_page(folder, heading, changes=None):
    """Returns the path of a recipe that a section of "Writing a recipe" has changed, and then ``changes``.

    Each hunk of its ``diff`` block is replaced; the code of the last ``python`` block stands before the class.
    """
    section = section_of(recipe_path(SFT).with_name("writing_a_recipe.md"), heading)
    hunks = [hunk for diff in re.findall(r"^```diff\n(.*?)^```", section, re.M | re.S) for hunk in diff.split("@@\n")]
    replaced = {}
    for hunk in hunks:
        lines = [(line[:1].strip(), line[1:]) for line in hunk.splitlines(keepends=True)]
        before, after = ("".join(text for mark, text in lines if mark != other) for other in "+-")
        replaced[before] = after
    code = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)[-1:]
    a_class = "class FullFinetuneRecipe:"
    path = changed_recipe(folder, {**replaced, a_class: "\n\n".join([*code, a_class])})
    return changed_recipe(folder, changes or {}, path)


def tiny_config(folder, **changes):
    """Returns a config whose model, data and weights are tiny; ``folder`` holds the weights."""
    config = {
        "output_dir": f"{folder}/out",
        "model": tiny.MODEL,
        "tokenizer": {"_component_": "tiny.tiny_tokenizer"},
        "dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 32},
        "loss": {"_component_": "recipe_utils.losses.LinearCrossEntropyLoss"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": f"{folder}/weights",
            "checkpoint_files": ["weights.pt"],
            "model_type": "LLAMA3_2",
            "output_dir": f"{folder}/out",
        },
        "metric_logger": {"_component_": "recipe_runs.ListLogger"},
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "seed": 0,
        "shuffle": True,
        "device": "cpu",
        "dtype": "fp32",
        "process_group_timeout_seconds": 300,
        **changes,
    }
    for file_name, sizes in WEIGHTS.items():
        if tiny.base_of(config["model"]) == sizes and "checkpointer" not in changes:
            config["checkpointer"]["checkpoint_files"] = [file_name]
    return {key: value for key, value in config.items() if value is not ...}


def tiny_dpo_config(folder, **changes):
    """Returns :func:`tiny_config` for pairs; the reference has weights of its own, so no reward is zero."""
    own = {
        "dataset": {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 19},
        "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.3},
    }
    config = tiny_config(folder, **{**own, **changes})
    if "ref_checkpointer" not in changes and "lora_rank" not in config["model"]:
        (file,) = config["checkpointer"]["checkpoint_files"]
        config["ref_checkpointer"] = {**config["checkpointer"], "checkpoint_files": [f"ref_{file}"]}
    return config


def tiny_kd_config(folder, **changes):
    """Returns :func:`tiny_config` with a teacher, whose weights differ from the student's for any model.

    ``teacher_sizes`` of the changes is its model.
    """
    sizes = changes.pop("teacher_sizes", tiny.WIDE_MODEL)
    config = tiny_config(folder, teacher_model=sizes, **changes)
    if "teacher_checkpointer" not in changes:
        (file,) = [file for file, each in WEIGHTS.items() if each == tiny.base_of(sizes)]
        config["teacher_checkpointer"] = {**tiny_config(folder)["checkpointer"], "checkpoint_files": [f"ref_{file}"]}
    return config


def writing_to(folder, config):
    """Returns the config of a run that writes to another folder."""
    checkpointer = {**config["checkpointer"], "output_dir": str(folder)}
    return {**config, "output_dir": str(folder), "checkpointer": checkpointer}


def exported_model(config):
    """Returns the file of the model that a run has exported at the end of its last epoch."""
    (file,) = Path(config["output_dir"], f"epoch_{config.get('epochs', 1) - 1}").glob("*.bin")
    return file


def refusal(config, recipe=SFT):
    """Returns the text of the error with which a recipe refuses a config before it trains."""
    cfg = OmegaConf.create(config)
    with pytest.raises(ConfigError) as error:
        recipe_class(recipe)(cfg).setup(cfg)
    return str(error.value)


def pretend_torchvision(monkeypatch):
    """Lets torchtune's image transforms import it: no wheel of it fits PyTorch's CPU builds."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, MagicMock())


def computing_in(dtype):
    """Returns a context in which fp64 is not left: torchtune's norms, RoPE and losses compute in fp32 otherwise.

    Curves of two ways to compute are compared so, because roundings of fp32 depend on the processor.
    """
    return tiny.float64_throughout() if dtype == "fp64" else nullcontext()


@contextmanager
def set_up(config, recipe=SFT):
    """Yields a recipe that is ready to train, with an empty log."""
    ListLogger.logged.clear()
    cfg = OmegaConf.create(config)
    made = recipe_class(recipe)(cfg)
    with computing_in(config["dtype"]), made.run:
        made.setup(cfg)
        yield made


def call_in_step(made, step, call):
    """Makes a recipe that was set up call a function when it begins an update step."""
    update = made.update

    def call_and_update(*args):
        if made.run.global_step + 1 == step:
            call()
        return update(*args)

    made.update = call_and_update


def run_recipe(config, recipe=SFT, reads_late=False):
    """Trains with ``config``; the metrics that rank 0 logged, empty on the others.

    With ``reads_late`` as on an accelerator, where the device may be behind the host.
    """
    with set_up(config, recipe) as made:
        made.run.metrics.late.is_late |= reads_late
        made.train()
    return list(ListLogger.logged)


def run_recipes(configs, recipe=SFT):
    """Returns the results of :func:`run_recipe` for each config."""
    return [run_recipe(config, recipe) for config in configs]


def run_compiled_recipe(config, recipe=SFT):
    """Returns the result of :func:`run_recipe` with compiled layers."""
    with pytest.MonkeyPatch.context() as patch:  # or later tests of this process would have it, too
        patch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # inductor takes a minute
        return run_recipe({**config, "compile": True}, recipe)


def run_stock_recipe(config, kind="full_finetune"):
    """Returns the metrics that torchtune's own recipe logs.

    It takes given adapters only with a recipe state, so they are put in here.
    """
    ListLogger.logged.clear()
    checkpointer = dict(config["checkpointer"])
    given = checkpointer.pop("adapter_checkpoint", None)
    cfg = OmegaConf.create({**STOCK_KEYS, **config, "checkpointer": checkpointer})
    on = "distributed" if kind == "full_dpo" else "single_device"  # it has no other
    path = Path(torchtune.__file__).parents[1] / "recipes" / f"{kind}_{on}.py"
    if kind == "full_dpo":
        let_stock_recipe_run_on_cpu(torch.device("cpu"))
    classes = runpy.run_path(str(path))
    start = "KD" if kind == "knowledge_distillation" else kind.replace("_", "")
    (name,) = [each for each in classes if each.lower().startswith(f"{start}recipe".lower())]
    recipe = classes[name](cfg)
    with computing_in(config["dtype"]):
        recipe.setup(cfg)
        if given is not None:
            recipe._model.load_state_dict(torch.load(given, weights_only=True), strict=False)
        recipe.train()
    return list(ListLogger.logged)


def run_recipe_keeping_warnings(config, recipe=SFT):
    """Returns the result of :func:`run_recipe`, and the warnings that this rank logged."""
    with keep_messages(logging.WARNING) as warnings:
        return run_recipe(config, recipe), warnings


@contextmanager
def keep_messages(level=logging.INFO):
    """Yields a list that receives every message of at least this level that this process logs."""
    messages = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())
    for logger in LOGGERS:
        logger.addHandler(handler)
    try:
        yield messages
    finally:
        for logger in LOGGERS:
            logger.removeHandler(handler)


def run_recipe_recording_gradients(config, recipe=SFT):
    """Returns the full float64 gradients of each update step, by parameter name."""
    recording = {} if "RecordingSGD" in str(config["optimizer"]) else {"optimizer": RECORDING_SGD}
    config = {**config, "dtype": "fp64", **recording}
    with set_up(config, recipe) as made:
        if recipe == DPO and "lora_rank" in config["model"]:
            move(made.model.module)  # or it would be its own reference
        return train_recording_gradients(made)


@torch.no_grad()
def move(model):
    """Changes trained parameters alike on any layout."""
    for parameter in trained_parameters(model).values():
        local(parameter).mul_(0.7)


def train_recording_gradients(made):
    """Trains a recipe that was set up; the full gradients of each update step, by parameter name."""
    tiny.RecordingSGD.recorded.clear()
    names_by_id = {id(p): name for name, p in parameters_by_name(made.model.module).items()}
    groups = made.stepper.optimizer.param_groups
    names = [names_by_id[id(p)] for group in groups for p in group["params"]]
    made.train()
    return [dict(zip(names, step, strict=True)) for step in tiny.RecordingSGD.recorded]


def with_adapters(config, folder):
    """Returns the config of an adapted model, which starts from adapters that change it."""
    adapters = get_adapter_params(tiny.adapted_model(config["model"]))
    path = folder / f"given_{zlib.crc32(str(config['model']).encode())}.pt"
    torch.save({name: p.detach() for name, p in adapters.items()}, path)
    given = {**config["checkpointer"], "adapter_checkpoint": str(path)}
    return {**config, "checkpointer": given}


def save_weights(folder):
    """Saves weights of the tiny models, which :func:`tiny_config` finds there."""
    (folder / "weights").mkdir(parents=True)
    for file_name, sizes in WEIGHTS.items():
        torch.save(tiny.tiny_model(sizes).state_dict(), folder / "weights" / file_name)
        # Weights of a reference or a teacher, which differs from the trained model at its start.
        other = tiny.tiny_model(sizes, seed=1)
        torch.save(other.state_dict(), folder / "weights" / f"ref_{file_name}")
