"""Refused configs and images of self-supervised training, by key, numbers and solution, before weights are read.

Values out of bounds of a single key: ``test_wrong_values.py``.
"""

import re

import pytest
import tiny
from big_batch_of_views import HEAD, MODEL, TRANSFORM, step_of_16
from omegaconf import OmegaConf
from recipe_runs import DINO, recipe_class, refusal, run_recipe

from recipe_utils.checkpoint.dinov3_vit import DINOv3Checkpointer
from recipe_utils.settings.problems import ConfigError

HELD_OUT = {
    "dataset_val": {"_component_": "tiny.tiny_images", "num_images": 9},
    "run_val_every_n_steps": 2,
    "knn_neighbors": 3,
}


def transform(**changes):
    return {"transform": {**TRANSFORM, **changes}}


REFUSED = {
    # ---- How many
    "a global batch that does not divide": (
        {"batch_size": 6, "koleo_group_size": 2},
        r"global_batch_size=16: .* batch_size=6 \* 1 data-parallel ranks = 6; .* 12 and 18",
    ),
    "a group that is cut": (
        {"batch_size": 8, "koleo_group_size": 3},
        "koleo_group_size=3: .* batch_size=8 is not a multiple .* set batch_size to 9",
    ),
    "an update step of one image": (
        {"batch_size": 1, "global_batch_size": 1, "koleo_group_size": None},
        "koleo_loss_weight=0.3: .* 1 image; set global_batch_size to 2 or more, or koleo_loss_weight=0",
    ),
    "another plan": ({"microbatching": "packed"}, "microbatching=packed: .*in_order"),
    # ---- Crops and masks
    "a local crop that is no multiple of the patch": (
        transform(local_crop_size=7),
        "local_crop_size=7: .* patch_size=4; .* 4 and 8",
    ),
    "a mask ratio that is reversed": ({"mask_ratio": [0.5, 0.1]}, r"mask_ratio=\[0.5, 0.1\]"),
    # ---- What is compared
    "no prototype": ({"dino_head": {**HEAD, "num_prototypes": 1}}, "dino_head.num_prototypes=1: .*2"),
    "no masked patch": ({"mask_probability": 0.0}, "mask_probability=0.0: .*or ibot_loss_weight=0"),
    "masks of nothing": ({"mask_ratio": [0, 0]}, r"mask_ratio=\[0.0, 0.0\]: .*or ibot_loss_weight=0"),
    "an average that stays": ({"ema_momentum": 1.0}, "ema_momentum=1.0: .* would never move; set it below 1"),
    "a student without contrast": ({"student_temperature": 1e30}, "student_temperature=.*at most 10"),
    "images that are their own neighbours": (
        {**HELD_OUT, "dataset_knn": HELD_OUT["dataset_val"]},
        "dataset_val: dataset_knn .* is the same",
    ),
    "no such argument of a head": ({"ibot_head": {"width": 3}}, "ibot_head.width: .*PrototypeHead"),
    "a teacher as soft as its student": (
        {"teacher_temperature": 0.1},
        "teacher_temperature=0.1: student_temperature=0.1 .* set it lower",
    ),
    "a teacher that starts softer than its student": (
        {"teacher_temperature_start": 0.2, "teacher_temperature_warmup_steps": 3},
        "teacher_temperature_start=0.2: student_temperature=0.1 .* set it lower",
    ),
    "a warm-up from nothing": (
        {"teacher_temperature_warmup_steps": 3},
        "teacher_temperature_warmup_steps=3: .* set both or neither",
    ),
    "no Gram teacher": (
        {"gram_teacher_every_n_steps": None},
        "gram_loss_weight=0.5: there is no Gram teacher; set gram_teacher_every_n_steps",
    ),
    "nothing to learn": (
        {
            "dino_loss_weight": 0.0, "ibot_loss_weight": 0.0, "koleo_loss_weight": 0.0,
            "gram_loss_weight": 0.0, "gram_teacher_every_n_steps": None,
        },
        "dino_loss_weight, .*: all are 0, so nothing would be learned; set one above 0",
    ),
    # ---- Models
    "batch norm": (
        {"model": {**MODEL, "_component_": "tiny.normalised_by_batch"}},
        "model: its norm is a BatchNorm1d, .*LayerNorm",
    ),
    "a model of text": ({"model": tiny.MODEL}, "model: it is a TransformerDecoder .*dinov3_vit"),
    # ---- The rest of a run
    "tensor parallel": ({"tensor_parallel_dim": 2}, "tensor_parallel_dim=2: not with images; set it to 1"),
    "in backward": ({"optimizer_in_bwd": True}, "optimizer_in_bwd=True: .* set it to False"),
    "questions": ({"sample_prompts": ["Hi"], "sample_every_n_steps": 1}, "sample_prompts: .* leave the key out"),
    "the best": (
        {"keep_best_checkpoint": True, **HELD_OUT},
        "keep_best_checkpoint=True: .* set export_every_n_steps",
    ),
    # ---- Data
    "text": (
        {"dataset": {"_component_": "tiny.samples_dataset", "tokenizer": None}},
        "dataset: .*labels.* and no image; set it to a dataset of images",
    ),
    "no image": ({"dataset": {"_component_": "tiny.tiny_images", "num_images": 0}}, "dataset: it has 0 samples"),
    "neighbours without labels": (
        {**HELD_OUT, "dataset_knn": {"_component_": "tiny.unlabelled_images"}},
        "dataset_knn: its images have no labels",
    ),
    "images without labels to tell": (
        {**HELD_OUT, "dataset_val": {"_component_": "tiny.unlabelled_images"}},
        "dataset_val: its images have no labels",
    ),
    "more neighbours than images": (
        {**HELD_OUT, "knn_neighbors": 38},
        "knn_neighbors=38: dataset_knn has 37 images; set it to fewer",
    ),
}  # fmt: skip


SEVERAL = ("a model of text", "tensor parallel")
"""Cases whose wrong value prevents other components from being built."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_config_is_refused_by_key(case, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(DINOv3Checkpointer, "load_checkpoint", lambda self: pytest.fail("reads"))
    changes, text = REFUSED[case]
    config = step_of_16(tiny_config, **{"batch_size": 16, **changes})
    with tiny.samples_of_the_test([{"tokens": [1, 2], "labels": [1, 2]}] * 8):
        found = refusal(config, DINO)
    assert case in SEVERAL or "1 problem" in found, found
    assert re.search(text, found), found
    assert not list(tmp_path.glob("out/*"))


def test_all_problems_of_keys_are_reported_at_once(tiny_config):
    config = step_of_16(tiny_config, batch_size=6, ema_momentum=2, gram_over="batch")
    with pytest.raises(ConfigError) as error:
        recipe_class(recipe=DINO)(OmegaConf.create(config))
    assert [str(problem).split(":")[0] for problem in error.value.problems] == [
        "ema_momentum=2",
        "gram_over=batch",
        "global_batch_size=16",
    ]


def test_heads_of_another_width_than_the_checkpoint_s_are_named(tiny_config):
    config = step_of_16(tiny_config, batch_size=16, max_steps_per_epoch=1)
    run_recipe(config, DINO)
    given = {**config["checkpointer"], "checkpoint_dir": f"{config['output_dir']}/epoch_0"}
    changed = {"ibot_head": {**HEAD, "bottleneck_dim": 7}, "checkpointer": given}
    text = refusal({**config, **changed}, DINO)
    assert "output.ibot" in text
    assert re.search(r"\(7, 10\).*\(6, 10\)|\(6, 10\).*\(7, 10\)", text), text
