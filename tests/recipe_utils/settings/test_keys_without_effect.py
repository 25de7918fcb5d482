"""A key that has no effect because of another key's value is refused by name."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.problems import ConfigError
from recipe_utils.settings.read import read_settings

CONFIGS = Path(__file__).parents[3] / "configs"
SFT = ("full_finetune_update_step", "llama3_2/5M_full_update_step")
KD = ("knowledge_distillation_update_step", "llama3_2/5M_to_1M_KD_update_step")
DINO = ("dinov3_update_step", "vit/digits_dinov3_update_step")


def read(recipe, config, folder, **changes):
    cfg = OmegaConf.merge(OmegaConf.load(CONFIGS / f"{config}.yaml"), changes)
    cfg.output_dir = str(folder)
    return read_settings(cfg, settings_of(recipe))


@pytest.mark.parametrize(
    ("recipe", "changes", "needed"),
    [
        (SFT, {"batch_size_val": 3}, {"run_val_every_n_steps": 5}),
        (SFT, {"sample_max_new_tokens": 7}, {"sample_prompts": ["a"], "sample_every_n_steps": 5}),
        (SFT, {"keep_best_checkpoint": True}, {"run_val_every_n_steps": 5}),
        (DINO, {"gram_teacher_every_n_steps": 5}, {"gram_loss_weight": 1.0}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[0][:3],
)
def test_a_key_without_effect_is_refused_by_name(recipe, changes, needed, tmp_path):
    others = {
        "run_val_every_n_steps": None, "sample_prompts": None, "sample_every_n_steps": None,
        "microbatching": "packed", "dataset_val": "${dataset}",
    }  # fmt: skip
    if recipe == DINO:
        others = {}
    with pytest.raises(ConfigError) as raised:
        read(*recipe, tmp_path, **others, **changes)
    (problem,) = map(str, raised.value.problems)
    ((key, value),) = changes.items()
    assert problem.startswith(f"{key}={value}: it has no effect with {next(iter(needed))}=")
    read(*recipe, tmp_path, **{**others, **changes, **needed})


def test_a_key_without_effect_may_have_its_default(tmp_path):
    read(*SFT, tmp_path, sample_prompts=None, sample_every_n_steps=None, sample_max_new_tokens=64)


def test_rows_of_a_packed_dataset_have_a_packed_attention(tiny_config):
    packed = {"_component_": "tiny.tiny_dataset", "num_samples": 8, "packed": True}
    for dataset in (packed, [packed]):
        config = tiny_config(dataset=dataset, packed_attention="by_document")
        read_settings(OmegaConf.create(config), settings_of(SFT[0]))
