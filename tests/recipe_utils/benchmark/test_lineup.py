import importlib.util
from types import SimpleNamespace

import pytest
import tiny
import yaml
from omegaconf import OmegaConf
from recipe_runs import tiny_config, tiny_dpo_config, tiny_kd_config
from torchtune import config as torchtune_config

from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.lineup import line_up, load_base_config, merged_with
from recipe_utils.cli.registry import RECIPES as RECIPES_OF_PROJECT
from recipe_utils.cli.registry import config_path, recipe_path
from recipe_utils.settings.problems import ConfigError

OURS = {"kind": "update_step"}
RECIPE_CONFIGS = RECIPES_OF_PROJECT["benchmark_tokens_per_second"]
OF_TRAINED_BASE = {"llama3_2/5M_lora_benchmark", "llama3_2/5M_transformers_benchmark"}
ADAPTED = {"model": tiny.adapted(tiny.MODEL)}
KD_LOSS = {"_component_": "recipe_utils.distillation.LinearDistillationLoss"}
RECIPES = {
    "text": ("full_finetune_update_step", tiny_config),
    "pairs": ("full_dpo_update_step", tiny_dpo_config),
    "distillation": ("knowledge_distillation_update_step", tiny_kd_config),
}


@pytest.fixture
def read(tmp_path):
    """Resolves the baselines of a benchmark over a tiny config, with changes."""

    def read(base=None, recipe="text", baselines=None, overrides=None, num_ranks=1):
        name, make = RECIPES[recipe]
        path = tmp_path / "base.yaml"
        path.write_text(yaml.safe_dump(make(tmp_path, **(base or {}))))
        merged = merged_with(load_base_config(str(path)), overrides or {})
        return line_up(name, merged, baselines or {"ours": OURS}, tmp_path / "out", num_ranks, 3)

    return read


def problems(read, *args, **changes):
    with pytest.raises(ConfigError) as caught:
        read(*args, **changes)
    return tuple(map(str, caught.value.problems))


def config_of(read, base=None, **entry):
    """Returns the resolved config of one baseline."""
    return read(base, baselines={"mine": {**OURS, **entry}})[0]["mine"].config


def test_overrides_may_refer_to_keys_of_the_config(read):
    baselines = {"ours": {**OURS, "gradient_accumulation_steps": "${batch_size}"}}
    config = read(overrides={"batch_size": 3, "seed": "${batch_size}"}, baselines=baselines)[0]["ours"].config
    assert config["seed"] == config["gradient_accumulation_steps"] == 3


def test_baselines_share_what_derives_from_output_dir_and_write_to_their_own_folder(read, tmp_path):
    checkpointer = tiny_config(tmp_path)["checkpointer"] | {"checkpoint_dir": "${my_folder}"}
    config = config_of(read, {"my_folder": "${output_dir}/fresh", "checkpointer": checkpointer})
    assert config["checkpointer"]["checkpoint_dir"] == f"{tmp_path}/out/fresh"
    assert config["output_dir"] == config["checkpointer"]["output_dir"] == f"{tmp_path}/out/baselines/mine"
    assert "my_folder" not in config, "the recipe refuses a key that nothing refers to"


def test_stock_gets_a_loss_of_torchtune_unless_it_is_overridden(read):
    assert config_of(read, kind="stock")["loss"]["_component_"] == "torchtune.modules.loss.CEWithChunkedOutputLoss"
    own = {"_component_": "torch.nn.CrossEntropyLoss"}
    assert config_of(read, kind="stock", loss=own)["loss"] == own
    assert config_of(read)["loss"]["_component_"].startswith("recipe_utils.")


def test_a_global_batch_is_divided_over_the_ranks(read):
    base = {"global_batch_size": 8, "gradient_accumulation_steps": None}
    assert read(base, num_ranks=2)[0]["ours"].config["gradient_accumulation_steps"] == 2
    assert any("global_batch_size=8: it is not a multiple" in text for text in problems(read, base, num_ranks=3))


def test_baselines_of_one_model_start_from_the_same_adapters(read, tmp_path):
    baselines = {
        "stock": {"kind": "stock"},
        "packed": {**OURS, "microbatching": "packed"},
        "rank_2": {**OURS, "model": tiny.adapted(tiny.MODEL, lora_rank=2)},
        "full": {**OURS, "model": tiny.MODEL},
    }
    baselines = read(ADAPTED, baselines=baselines)[0].values()
    assert [each.draws_adapters for each in baselines] == [True, True, True, False]
    stock, packed, rank_2, full = (each.config["checkpointer"] for each in baselines)
    assert stock["adapter_checkpoint"].startswith(f"{tmp_path}/out/start_adapters/")
    assert packed["adapter_checkpoint"] == stock["adapter_checkpoint"]
    assert rank_2["adapter_checkpoint"] != stock["adapter_checkpoint"]
    assert "adapter_checkpoint" not in full


def test_an_override_that_names_a_component_replaces_it_whole(tmp_path):
    base = OmegaConf.create(tiny_config(tmp_path))
    merged = merged_with(base, {"optimizer": {"_component_": "torch.optim.SGD"}, "dataset": {"seed": 1}})
    assert merged.optimizer == {"_component_": "torch.optim.SGD"}
    assert merged.dataset.num_samples == 32
    assert "seed" not in base.dataset


@pytest.mark.parametrize(
    ("recipe", "kind", "changes", "num_ranks", "reason"),
    [
        ("text", "limit", {}, 2, "runs as one process only"),
        ("text", "trl_sft", {}, 2, "runs as one process only"),
        ("text", "hf_trainer", ADAPTED, 1, "trains no adapters"),
        ("pairs", "stock", ADAPTED, 1, "trains no adapters on pairs"),
    ],
)
def test_baselines_are_skipped_where_they_cannot_run(recipe, kind, changes, num_ranks, reason, read):
    baselines, skipped = read(changes, recipe, baselines={"ours": OURS, "other": {"kind": kind}}, num_ranks=num_ranks)
    assert list(baselines) == ["ours"]
    assert skipped == {"other": f"skipped: {reason}"}


def test_missing_packages_are_named(read, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    skipped = read(baselines={"ours": OURS, "hf": {"kind": "hf_trainer"}})[1]
    assert skipped["hf"] == ("skipped: transformers and accelerate not installed (pip install transformers accelerate)")


def test_keys_and_components_of_the_base_config_are_checked(read):
    found = problems(
        read,
        {"batchsize": 2, "optimizer": {"_component_": "torch.optim.AdamW", "lrr": 0.1}},
        overrides={"tensor_parallel_dim": 2, "dataset": {"packed": True}},
    )
    assert any(text.startswith("batchsize: this recipe has no such key") for text in found)
    assert "optimizer.lrr: AdamW has no such argument; did you mean lr?" in found
    for override in ("tensor_parallel_dim=2", "dataset.packed=True"):
        assert any(text.startswith(f"overrides.{override}: ") for text in found)


def test_a_packed_dataset_is_of_stock_only(read):
    packed = {"dataset": {"packed": True}, "batch_size": 1}  # rows of 64 tokens
    baselines, _ = read(baselines={"stock": {"kind": "stock"}, "stock_packed": {"kind": "stock", **packed}})
    of_samples, of_rows = (each.contents[0] for each in baselines.values())
    assert len(of_samples.document_lengths) == 4
    assert len(of_rows.document_lengths) > 4
    assert 64 < of_rows.num_real_tokens == sum(of_rows.document_lengths) <= 2 * 64
    assert of_rows.num_flops > of_samples.num_flops
    wrong = {"hf": {"kind": "hf_trainer", **packed}, "limit": {"kind": "limit", **packed}}
    for kind, problem in zip(wrong, problems(read, baselines=wrong), strict=True):
        assert problem.startswith(
            f"baselines.{kind}: dataset.packed=True: kind={wrong[kind]['kind']} does not read rows"
        )


def test_transformers_trainer_without_a_folder_builds_a_llama_only(read):
    random = {"_component_": "recipe_utils.check_gradient.RandomWeights", "model": "${model}", "seed": 0}
    baselines = {"hf": {"kind": "hf_trainer"}}
    assert list(read({"checkpointer": random}, baselines=baselines)[0]) == ["hf"]
    (problem,) = problems(read, {"checkpointer": random, "model": tiny.GEMMA2_MODEL}, baselines=baselines)
    assert problem.startswith("baselines.hf: model=torchtune.models.gemma2.gemma2: without checkpointer.checkpoint_dir")


def test_pairs_have_kinds_and_keys_of_their_own(read):
    baselines = {"hf": {"kind": "hf_trainer"}, "stock": {"kind": "stock", "train_sampling_strategy": 9}}
    (found,) = problems(read, {"ref_checkpointer": None, "sft_loss_weight": 1.0}, "pairs", baselines=baselines)
    assert found.startswith("overrides.sft_loss_weight=1.0: only kind=update_step adds it")
    first, second = problems(read, {"ref_checkpointer": None}, "pairs", baselines=baselines)
    assert first == "baselines.hf: kind=hf_trainer: set it to one of stock, update_step"
    assert second.startswith("baselines.stock: train_sampling_strategy: this recipe has no such key")


@pytest.mark.parametrize(
    ("kd_loss", "problem"),
    [
        ({**KD_LOSS, "divergence": "js"}, "overrides.kd_loss.divergence=js: "),
        ({"_component_": "torchtune.modules.loss.ReverseKLLoss"}, "overrides.kd_loss: ReverseKLL"),
        ({**KD_LOSS, "temperature": 2.0}, "overrides.kd_loss.temperature=2.0: "),
    ],
)
def test_a_divergence_whose_losses_do_not_compare_is_refused(read, kd_loss, problem):
    (found,) = problems(read, {"kd_loss": kd_loss}, "distillation")
    assert found.startswith(problem)


def test_an_unreadable_config_is_refused(tmp_path):
    for text in ("a: [", "- a"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=f"update_step_config={tmp_path}/bad.yaml: "):
            load_base_config(f"{tmp_path}/bad.yaml")
    assert load_base_config("llama3_2/5M_full_update_step").batch_size == 4
    with pytest.raises(ConfigError, match=r"update_step_config=llama9/1B: .* set it to"):
        load_base_config("llama9/1B")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in RECIPE_CONFIGS if n not in OF_TRAINED_BASE])
def test_configs_of_the_benchmark_are_read(name, tmp_path):
    cfg = OmegaConf.load(config_path(name))
    base = load_base_config(cfg.update_step_config) if "update_step_config" in cfg else OmegaConf.create()
    base = merged_with(base, {**OmegaConf.to_container(cfg.overrides), "device": "cpu"})
    recipe = cfg.get("update_step_recipe", "full_finetune_update_step")
    assert line_up(recipe, base, OmegaConf.to_container(cfg.baselines), tmp_path, 1, 3)[0]


def test_losses_include_the_teachers_entropy_with_the_weight_of_the_divergence(read, monkeypatch):
    base, baselines = {"kd_ratio": 0.25, "kd_loss": KD_LOSS}, {"stock": {"kind": "stock"}, "ours": OURS}
    stock, ours = read(base, "distillation", baselines=baselines)[0].values()
    assert stock.config["kd_loss"]["_component_"].endswith(".ForwardKLWithChunkedOutputLoss")
    assert ours.config["kd_loss"] == KD_LOSS
    taken = []
    monkeypatch.setattr(LossLogger, "gate", SimpleNamespace(add_loss=taken.append))
    logger = torchtune_config.instantiate(OmegaConf.create(ours.config["metric_logger"]))
    logger.log_dict({"loss": 2.0, "teacher_entropy": 4.0}, 1)
    logger.log_dict({"loss": 2.0}, 2)
    assert taken == [3, 2]


def own_recipe(path, *changes):
    """Writes a copy of the recipe with a key of its own."""
    text = recipe_path(RECIPES["text"][0]).read_text()
    for old, new in [("    loss: Component", "    my_key: int = 1\n    loss: Component"), *changes]:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return str(path)


def test_a_baseline_may_run_a_recipe_file_with_keys_of_its_own(read, tmp_path):
    path = own_recipe(tmp_path / "my_recipe.py")
    baselines, _ = read(baselines={"ours": OURS, "mine": {**OURS, "recipe": path, "my_key": 3}})
    assert [each.recipe_file for each in baselines.values()] == ["full_finetune_update_step", path]
    assert baselines["mine"].config["my_key"] == 3
    assert "my_key" not in baselines["ours"].config


def test_a_recipe_file_that_a_baseline_cannot_run_is_refused(read, tmp_path):
    empty = own_recipe(tmp_path / "empty.py", ("def update(", "def other("))
    entries = {
        "stock": {"kind": "stock", "recipe": "my_recipe.py"},
        "none": {**OURS, "recipe": "no_such.py"},
        "empty": {**OURS, "recipe": empty},
        "wrong": {**OURS, "my_key": 3},
    }
    stock, none, of_empty, wrong = problems(read, baselines=entries)
    assert stock == "baselines.stock: recipe=my_recipe.py: only kind=update_step runs a recipe file; take it out"
    assert none.startswith("baselines.none: recipe: no_such.py: no recipe of this name or path")
    assert of_empty.startswith(f"baselines.empty: recipe={empty}: the file needs one class")
    assert wrong.startswith("baselines.wrong: my_key: this recipe has no such key")
