"""The README's commands: the embedded defaults train on real text, export and sample."""

import ast
import contextlib
import math
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import torchtune
from omegaconf import OmegaConf
from programs import tune_run_here
from torchtune import config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, LlamaForCausalLM

from recipe_utils.cli.registry import config_path
from recipe_utils.examples.digits.pictures import digit_pictures_dataset
from recipe_utils.examples.stdlib_sources import SKIPPED_DIRS
from recipe_utils.examples.word_counts.credits import main as write_credits
from recipe_utils.text.conversations.tokenizer import FolderTokenizer
from recipe_utils.training.log import read_metrics

FULL = ("full_finetune_update_step", "llama3_2/5M_full_update_step")
LORA = ("lora_finetune_update_step", "llama3_2/5M_lora_update_step")
DPO = ("full_dpo_update_step", "llama3_2/5M_full_dpo_update_step")
KD = ("knowledge_distillation_update_step", "llama3_2/5M_to_1M_KD_update_step")
POLICY = ("full_policy_update_step", "llama3_2/5M_policy_update_step")
PICTURES = ("full_finetune_update_step", "qwen2_vl/digits_update_step")
QWEN3 = ("full_finetune_update_step", "qwen3/5M_full_update_step")
QWEN3_LORA = ("lora_finetune_update_step", "qwen3/5M_lora_update_step")
GENERATION = config_path("llama3_2/5M_generation")
GENERATE = str(Path(torchtune.__file__).parents[1] / "recipes" / "generate.py")


def train(default, folder, *overrides):
    recipe, name = default
    code, screen = tune_run_here(recipe, config_path(name), f"output_dir={folder}", *overrides)
    assert code == 0, screen
    return screen


def answer(path, *overrides):
    code, screen = tune_run_here(GENERATE, path, "max_new_tokens=5", *overrides)
    assert code == 0, screen
    assert "Time for inference" in screen
    return screen


def logged(folder, name):
    """Returns values of a metric, in the order of update steps."""
    lines = read_metrics(folder / "logs" / "metrics.jsonl")
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the output folder of the embedded default after 10 update steps, at a rate for so few.

    Its data are those of the Python that runs the tests. At rates from 2e-3 some of them let the loss jump to 10, others not.
    """
    folder = tmp_path_factory.mktemp("embedded")
    rate = ("optimizer.lr=1e-3", "lr_scheduler.num_warmup_steps=10")
    few = ("run_val_every_n_steps=6", "dataset_val.num_validation_samples=32")
    screen = train(FULL, folder, "max_steps_per_epoch=10", "export_every_n_steps=9", *rate, *few)
    (folder / "screen").write_text(screen)
    return folder


def num_docstrings(node):
    """Returns the number of docstrings of more than 20 characters of a module or class and of what is public in it."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    inside = [each for each in node.body if isinstance(each, kinds) and not re.match("_(?!_)", each.name)]
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return (len(ast.get_docstring(node) or "") > 20) + sum(map(num_docstrings, [] if is_function else inside))


def test_it_trains_on_the_library_of_the_python_that_runs_and_logs_its_number_of_texts(trained):
    library, found = Path(sysconfig.get_path("stdlib")), len(topics)
    for path in library.rglob("*.py"):
        parts = path.relative_to(library).with_suffix("").parts
        if not SKIPPED_DIRS & {*parts[:-1]} and not any(re.match("_(?!_)", part) for part in parts):
            with contextlib.suppress(SyntaxError, UnicodeDecodeError):
                found += num_docstrings(ast.parse(path.read_text(encoding="utf-8")))
    screen = (trained / "screen").read_text()
    assert (
        f"docstrings.json: {found:,} texts, made of the standard library of Python {platform.python_version()}"
        in screen
    )
    assert f"Data: {found - 64:,} samples" in screen  # 64 are held out


def test_without_the_extras_recipes_start_and_components_that_need_one_are_named():
    extras = ["transformers", "peft", "trl", "accelerate", "sklearn", "matplotlib"]
    program = (
        f"import runpy, sys; sys.modules |= dict.fromkeys({extras}); "
        "from recipe_utils.cli.registry import TRAINING_RECIPES, recipe_path; "
        "[runpy.run_path(str(recipe_path(name))) for name in TRAINING_RECIPES]; "
        f"sys.argv = ['tune', '--config', {str(config_path(QWEN3[1]))!r}]; "
        f"runpy.run_path(str(recipe_path({QWEN3[0]!r})), run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    for component in ("model._component_=recipe_utils.models.causal_lm", "recipe_utils.checkpoint.FolderCheckpointer"):
        assert f"{component}: it needs transformers; pip install -e '.[hf]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_train_and_validation_loss_fall(trained):
    losses, val_losses = logged(trained, "loss"), logged(trained, "val_loss")
    assert (len(losses), len(val_losses)) == (10, 3)  # before, after 6, and at the end
    assert losses[0] == pytest.approx(8.4, abs=0.1)  # about ln(4096), that of fresh weights
    assert losses[-1] < losses[0] - 0.2  # 0.9 on Python 3.11
    assert val_losses[-1] < val_losses[0] - 0.2


def test_generate_loads_the_model(trained):
    screen = answer(GENERATION, f"output_dir={trained}", "prompt.user=What does `os.path.join` do?")
    assert screen.count("What does `os.path.join` do?") == 2  # of the config and of the sample
    assert not list((trained / "epoch_0").glob(".*"))


@pytest.mark.parametrize("exported", ["epoch_0", pytest.param("export_step_9", marks=pytest.mark.slow)])
def test_exports_load_in_transformers_with_equal_logits(exported, trained):
    cfg = OmegaConf.load(GENERATION)
    cfg.output_dir = str(trained)
    model = config.instantiate(cfg.model)
    cfg.checkpoint_dir = str(trained / exported)
    model.load_state_dict(config.instantiate(cfg.checkpointer).load_checkpoint()["model"])
    hugging_face = LlamaForCausalLM.from_pretrained(trained / exported)
    tokens = torch.randint(4096, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model(tokens) - hugging_face(tokens).logits).abs().max() < 1e-4
    text = "What does `os.path.join` do? — 你好"
    ids = AutoTokenizer.from_pretrained(trained / exported)(text).input_ids
    assert ids == config.instantiate(cfg.tokenizer).encode(text, add_eos=False)


@pytest.mark.slow
def test_adapters_lower_the_validation_loss_and_generate_loads_the_merged_model(trained, tmp_path):
    each = ("max_steps_per_epoch=12", "run_val_every_n_steps=12")
    train(LORA, tmp_path, f"checkpoint_dir={trained}/epoch_0", *each)
    val_losses = logged(tmp_path, "val_loss")
    assert val_losses[-1] < val_losses[0] - 0.2
    folders = (f"checkpoint_dir={tmp_path}/epoch_0", f"output_dir={tmp_path}")
    assert answer(GENERATION, *folders, "prompt.user=Write `shlex.join`.").count("Write `shlex.join`.") == 2


@pytest.mark.slow
def test_a_folder_of_transformers_is_trained_from_scratch_and_then_with_adapters(tmp_path):
    """Fresh weights are exported with the tokenizer; adapters use its chat template, merged and for PEFT."""
    first, second = tmp_path / "full", tmp_path / "lora"
    each = ("run_val_every_n_steps=5", "optimizer.lr=4e-3", "lr_scheduler.num_warmup_steps=4")
    train(QWEN3, first, "max_steps_per_epoch=10", *each)
    train(QWEN3_LORA, second, f"checkpoint_dir={first}/epoch_0", "max_steps_per_epoch=10", *each)
    for folder in (first, second):
        val_losses = logged(folder, "val_loss")
        assert val_losses[-1] < val_losses[0] - 0.1
        model = AutoModelForCausalLM.from_pretrained(folder / "epoch_0")
        tokenizer = AutoTokenizer.from_pretrained(folder / "epoch_0")
        prompt = [{"role": "user", "content": "What does `os.path.join` do?"}]
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert model.generate(**inputs, max_new_tokens=3).shape[1] > inputs["input_ids"].shape[1]
    assert (second / "epoch_0" / "adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_numbers_on_held_out_pictures_are_read(tmp_path):
    """The answers are transformers' own, by the exported folder; 183 of 200 were right on one machine."""
    train(PICTURES, tmp_path)
    before, *_, after = logged(tmp_path, "val_loss")
    assert float(after) < 0.1 * float(before)
    dataset = digit_pictures_dataset(
        FolderTokenizer(str(tmp_path / "epoch_1")), str(tmp_path / "pictures"), "validation"
    )
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "epoch_1")
    num_right = 0
    for sample in dataset:
        first = next(place for place, label in enumerate(sample["labels"]) if label >= 0)
        images, tokens = sample["image_inputs"], torch.tensor(sample["tokens"])
        types = {name: torch.from_numpy(column[:first])[None] for name, column in images.types.items()}
        inputs = {"input_ids": tokens[None, :first], **types, **images.pixels[0].tensors}
        answer = model.generate(**inputs, max_new_tokens=len(tokens) - first, do_sample=False)[0, first:]
        num_right += torch.equal(answer, tokens[first:])
    assert num_right >= 150


@pytest.mark.slow
def test_preferences_of_held_out_pairs_are_learned(tmp_path):
    train(DPO, tmp_path, "max_steps_per_epoch=25", "run_val_every_n_steps=25")
    losses = logged(tmp_path, "loss")
    assert len(losses) == 25
    assert losses[0] == pytest.approx(math.log(2))  # model and reference are one
    assert (tmp_path / "epoch_0" / "model-00001-of-00001.safetensors").exists()
    before, loss = logged(tmp_path, "val_loss")
    _, accuracy = logged(tmp_path, "val_rewards/accuracies")
    assert before == pytest.approx(math.log(2))
    assert float(loss) < math.log(2) - 0.02
    assert float(accuracy) > 0.59  # of 200 pairs; guessing has a standard deviation of 0.035


@pytest.mark.slow
def test_rewards_of_held_out_questions_rise_also_from_files_and_with_advantages_of_tokens(tmp_path):
    first, files, credits = tmp_path / "first", tmp_path / "files", tmp_path / "credits"
    few = ("epochs=30", "run_val_every_n_steps=120", f"data_dir={first}/data")
    train(POLICY, first, *few)
    before, after = logged(first, "val_reward")
    assert before == pytest.approx(0.34, abs=0.06)
    assert after > before + 0.15  # of 256 answers
    train(POLICY, files, *few, "~sampler", f"dataset.path={first}/rounds")
    assert logged(files, "loss") == logged(first, "loss")
    assert logged(files, "val_reward") == [before, after]
    write_credits(str(first / "rounds"), str(credits), str(first / "data/warm/tokenizer.model"))
    given = ("~sampler", f"dataset.path={credits}", "dataset.advantage=given")
    train(POLICY, tmp_path / "given", *few, *given)
    assert logged(tmp_path / "given", "mean_reward") == logged(first, "mean_reward")  # of the same answers
    assert logged(tmp_path / "given", "val_reward")[-1] > before + 0.06


@pytest.mark.slow
def test_the_student_approaches_its_teacher_and_has_its_tokenizer(trained, tmp_path):
    each = ("max_steps_per_epoch=20", "run_val_every_n_steps=10")
    train(KD, tmp_path, f"teacher_dir={trained}/epoch_0", *each)
    divergences = logged(tmp_path, "val_kd_loss")
    assert len(divergences) == 3
    assert divergences[2] < divergences[1] < divergences[0]
    assert divergences[2] < divergences[0] / 2
    tokenizers = [each / "epoch_0" / "tokenizer.model" for each in (tmp_path, trained)]
    assert tokenizers[0].read_text() == tokenizers[1].read_text()
    question = "What does `os.path.join` do?"
    assert question in answer(tmp_path / "generation.yaml", f"prompt.user={question}")


@pytest.mark.parametrize(("default", "key"), [(LORA, "checkpoint_dir"), (KD, "teacher_dir")])
def test_without_the_first_default_the_error_has_its_command(default, key, tmp_path):
    recipe, name = default
    folders = (f"output_dir={tmp_path}/out", f"{key}={tmp_path}/not_there")
    code, screen = tune_run_here(recipe, config_path(name), *folders)
    assert code == 2, screen
    command = "tune run full_finetune_update_step --config llama3_2/5M_full_update_step"
    assert f"first: {command}" in screen
    assert "Traceback" not in screen
    assert not (tmp_path / "not_there").exists()
