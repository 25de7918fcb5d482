"""The README's first commands: the embedded default trains on real text, saves, loads and answers."""

import math

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config
from warm_tune import tune

from recipe_utils.run.log import read_metrics
from recipe_utils.tune.registry import config_path


def tune_run(*arguments):
    done = tune("run", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def logged(folder, name):
    """Values of a metric, in the order of update steps."""
    lines = read_metrics(folder / "logs" / "metrics.jsonl")
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Output folder of the embedded default after 10 of its update steps."""
    folder = tmp_path_factory.mktemp("embedded")
    tune_run(
        "full_finetune_update_step",
        "--config",
        "llama3_2/5M_full_update_step",
        f"output_dir={folder}",
        "max_steps_per_epoch=10",
        "run_val_every_n_steps=3",
        "export_every_n_steps=9",
    )
    return folder


@pytest.mark.parametrize("num_stages", [2, 4])
def test_pipeline_stages_log_the_losses_of_one_process(num_stages, one_process_losses, trained):
    assert len(one_process_losses) == 10
    staged = short_losses(trained, num_stages)
    assert staged == pytest.approx(one_process_losses, rel=1e-5)


@pytest.fixture(scope="module")
def one_process_losses(trained):
    return short_losses(trained, 1)


def short_losses(trained, num_stages):
    """Losses of 10 small update steps from the weights that ``trained`` started from."""
    output_dir = trained / f"stages_{num_stages}"
    tune_run(
        *(["--nproc_per_node", str(num_stages)] if num_stages > 1 else []),
        "full_finetune_update_step",
        "--config",
        "llama3_2/5M_full_update_step",
        f"output_dir={output_dir}",
        f"checkpoint_dir={trained}/fresh",
        f"docstrings_path={trained}/docstrings.json",
        f"pipeline_parallel_dim={num_stages}",
        "batch_size=2",
        "global_batch_size=8",
        "~gradient_accumulation_steps",
        "max_tokens_per_microbatch=512",
        "max_steps_per_epoch=10",
        "run_val_every_n_steps=null",
    )
    return logged(output_dir, "loss")


def test_train_and_validation_loss_fall(trained):
    losses = logged(trained, "loss")
    val_losses = logged(trained, "val_loss")
    assert len(losses) == 10
    assert losses[0] == pytest.approx(8.4, abs=0.1)  # about ln(4096): fresh weights know nothing
    assert losses[-1] < 7.5
    assert len(val_losses) == 3
    assert val_losses[-1] < val_losses[0] - 0.2


def test_the_readme_s_next_command_samples_from_the_checkpoint(trained):
    printed = tune_run(
        "generate",
        "--config",
        "llama3_2/5M_generation",
        f"output_dir={trained}",
        "max_new_tokens=5",
        "prompt.user=What does `os.path.join` do?",
    )
    assert "What does `os.path.join` do?\n\n" in printed
    assert "Time for inference" in printed
    assert not list((trained / "epoch_0").glob(".*"))


@pytest.fixture(scope="module")
def adapted(trained, tmp_path_factory):
    """Output folder of the embedded default of LoRA after 12 of its update steps, on ``trained``."""
    folder = tmp_path_factory.mktemp("adapted")
    tune_run(
        "lora_finetune_update_step",
        "--config",
        "llama3_2/5M_lora_update_step",
        f"output_dir={folder}",
        f"checkpoint_dir={trained}/epoch_0",
        "max_steps_per_epoch=12",
        "run_val_every_n_steps=4",
    )
    return folder


def test_adapters_lower_the_validation_loss_of_text_of_another_kind(adapted):
    val_losses = logged(adapted, "val_loss")
    assert len(val_losses) == 3
    assert val_losses[-1] < val_losses[0] - 0.2


def test_the_readme_s_last_command_samples_from_the_model_with_its_adapters_merged(adapted):
    printed = tune_run(
        "generate",
        "--config",
        "llama3_2/5M_generation",
        f"checkpoint_dir={adapted}/epoch_0",
        f"output_dir={adapted}",
        "max_new_tokens=5",
        "prompt.user=Write `shlex.join`.",
    )
    assert "Write `shlex.join`.\n\n" in printed


@pytest.fixture(scope="module")
def preferring(tmp_path_factory):
    """Output folder of the embedded default of preference tuning after 25 of its update steps."""
    folder = tmp_path_factory.mktemp("preferring")
    tune_run(
        "full_dpo_update_step",
        "--config",
        "llama3_2/5M_full_dpo_update_step",
        f"output_dir={folder}",
        "max_steps_per_epoch=25",
        "run_val_every_n_steps=25",
    )
    return folder


def test_preference_tuning_starts_where_model_and_reference_are_one_and_exports(preferring):
    losses = logged(preferring, "loss")
    assert len(losses) == 25
    assert losses[0] == pytest.approx(math.log(2))
    assert (preferring / "epoch_0" / "model-00001-of-00001.safetensors").exists()


def test_answers_in_their_right_order_are_preferred_on_held_out_pairs(preferring):
    (loss,) = logged(preferring, "val_loss")
    (accuracy,) = logged(preferring, "val_rewards/accuracies")
    assert float(loss) < math.log(2) - 0.02
    assert float(accuracy) > 0.59  # of 200 pairs; guessing has a standard deviation of 0.035


@pytest.fixture(scope="module")
def distilled(trained, tmp_path_factory):
    """Output folder of the embedded default of distillation after 20 of its update steps, ``trained`` being the teacher."""
    folder = tmp_path_factory.mktemp("distilled")
    tune_run(
        "knowledge_distillation_update_step",
        "--config",
        "llama3_2/5M_to_1M_KD_update_step",
        f"output_dir={folder}",
        f"teacher_dir={trained}/epoch_0",
        "max_steps_per_epoch=20",
        "run_val_every_n_steps=10",
    )
    return folder


def test_the_student_comes_nearer_to_its_teacher_on_held_out_text(distilled):
    divergences = logged(distilled, "val_kd_loss")
    assert len(divergences) == 2
    assert divergences[1] < divergences[0] / 2


def test_the_student_s_export_has_its_teacher_s_tokenizer_and_samples(distilled, trained):
    tokenizers = [each / "epoch_0" / "tokenizer.model" for each in (distilled, trained)]
    assert tokenizers[0].read_text() == tokenizers[1].read_text()
    printed = tune_run(
        "generate",
        "--config",
        "llama3_2/5M_generation",
        *("model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2"),
        *("model.embed_dim=128", "model.intermediate_dim=384"),
        f"output_dir={distilled}",
        "max_new_tokens=5",
    )
    assert "What does `os.path.join` do?" in printed
    assert "Time for inference" in printed


@pytest.mark.parametrize(
    ("recipe", "default", "key"),
    [
        ("lora_finetune_update_step", "llama3_2/5M_lora_update_step", "checkpoint_dir"),
        (
            "knowledge_distillation_update_step",
            "llama3_2/5M_to_1M_KD_update_step",
            "teacher_dir",
        ),
    ],
)
def test_where_the_first_default_was_not_trained_the_error_says_how(recipe, default, key, tmp_path):
    done = tune(
        *("run", recipe, "--config", default),
        *(f"output_dir={tmp_path}/out", f"{key}={tmp_path}/not_there"),
    )
    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert "first: tune run full_finetune_update_step --config llama3_2/5M_full_update_step" in said
    assert "Traceback" not in said
    assert not (tmp_path / "not_there").exists()


@pytest.mark.parametrize("exported", ["epoch_0", "export_step_9"])
def test_what_is_exported_loads_in_transformers_with_equal_logits(exported, trained):
    transformers = pytest.importorskip("transformers")
    cfg = OmegaConf.load(config_path("llama3_2/5M_generation"))
    cfg.output_dir = str(trained)
    model = config.instantiate(cfg.model)
    cfg.checkpoint_dir = str(trained / exported)
    model.load_state_dict(config.instantiate(cfg.checkpointer).load_checkpoint()["model"])
    hugging_face = transformers.LlamaForCausalLM.from_pretrained(trained / exported)
    tokens = torch.randint(4096, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model(tokens) - hugging_face(tokens).logits).abs().max() < 1e-4
    text = "What does `os.path.join` do? — 你好"
    ids = transformers.AutoTokenizer.from_pretrained(trained / exported)(text).input_ids
    assert ids == config.instantiate(cfg.tokenizer).encode(text, add_eos=False)
