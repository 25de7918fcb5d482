"""What a self-supervised training cannot do is refused before a weight is read, by key, numbers and a way out."""

import re

import pytest
import tiny
from big_batch_of_views import HEAD, MODEL, TRANSFORM, step_of_16
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DINO, recipe_class, run_recipe

from recipe_utils.checkpoint.dinov3_vit import DINOv3Checkpointer
from recipe_utils.settings.problems import ConfigError

HELD_OUT = {
    "dataset_val": {"_component_": "tiny.tiny_images", "num_images": 9},
    "run_val_every_n_steps": 2,
    "knn_neighbors": 3,
}


def transform(**changes):
    return {"transform": {**TRANSFORM, **changes}}


def images(**changes):
    return {"dataset": {"_component_": "tiny.broken_images", **changes}}


REFUSED = {
    # ---- How many
    "no image in a microbatch": ({"batch_size": 0}, "batch_size=0: it must be at least 1"),
    "a global batch that does not divide": (
        {"batch_size": 6, "koleo_group_size": 2},
        r"global_batch_size=16: .* batch_size=6 \* 1 data-parallel ranks = 6; .* 12 and 18",
    ),
    "a group that is cut": (
        {"batch_size": 8, "koleo_group_size": 3},
        "koleo_group_size=3: .* batch_size=8 is not a multiple .* set batch_size to 9",
    ),
    "the group's default and a small batch": (
        {"batch_size": 4, "koleo_group_size": 16},
        "koleo_group_size=16: .* batch_size=4 .* set batch_size to 16",
    ),
    "a group of one": ({"koleo_group_size": 1}, "koleo_group_size=1: it must be at least 2"),
    "an update step of one image": (
        {"batch_size": 1, "global_batch_size": 1, "koleo_group_size": None},
        "koleo_loss_weight=0.3: .* 1 image .* global_batch_size to 2 or more, or koleo_loss_weight=0",
    ),
    "another plan": ({"microbatching": "packed"}, "microbatching=packed: .*in_order"),
    # ---- Crops and masks
    "a global crop that is no multiple of the patch": (
        transform(global_crop_size=13),
        "global_crop_size=13: .* patch_size=4; .* 12 and 16",
    ),
    "a local crop that is no multiple of the patch": (
        transform(local_crop_size=7),
        "local_crop_size=7: .* patch_size=4; .* 4 and 8",
    ),
    "no local crop": (transform(num_local_crops=0), "num_local_crops=0: .*1"),
    "an area above the image's": (
        transform(global_crop_scale=[0.3, 1.5]),
        r"global_crop_scale=\[0.3, 1.5\]",
    ),
    "a mask ratio above one": ({"mask_ratio": [0.1, 1.5]}, r"mask_ratio=\[0.1, 1.5\]: .*0 to 1"),
    "a mask ratio that is reversed": ({"mask_ratio": [0.5, 0.1]}, r"mask_ratio=\[0.5, 0.1\]"),
    "a mask ratio below zero": ({"mask_ratio": [-0.1, 0.5]}, r"mask_ratio=\[-0.1, 0.5\]"),
    "one mask ratio": ({"mask_ratio": [0.5]}, r"mask_ratio=\[0.5\]"),
    "a probability above one": (
        {"mask_probability": 1.5},
        "mask_probability=1.5: it must be at most 1",
    ),
    "positions that shrink only": ({"rope_rescale": 0.5}, "rope_rescale=0.5: it must be at least 1"),
    "channels": (
        transform(mean=[0.3, 0.3, 0.3], std=[0.4, 0.4, 0.4]),
        r"transform.mean=.*3 values for the model's 1 channels",
    ),
    "another transform": (
        {"transform": {"_component_": "torch.nn.Identity"}},
        "transform: it is a Identity; set it to .*MultiCrop",
    ),
    # ---- What is compared
    "no prototype": ({"dino_head": {**HEAD, "num_prototypes": 0}}, "dino_head.num_prototypes=0: .*1"),
    "no bottleneck": ({"ibot_head": {**HEAD, "bottleneck_dim": 0}}, "ibot_head.bottleneck_dim=0: .*1"),
    "no such argument of a head": ({"ibot_head": {"width": 3}}, "ibot_head.width: .*PrototypeHead"),
    "no temperature": (
        {"student_temperature": 0.0},
        "student_temperature=0.0: it must be above 0",
    ),
    "no temperature of the teacher": (
        {"teacher_temperature": -0.1},
        "teacher_temperature=-0.1: it must be above 0",
    ),
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
    "momentum above one": ({"ema_momentum": 1.5}, "ema_momentum=1.5: it must be at most 1"),
    "momentum below zero": ({"ema_momentum": -0.1}, "ema_momentum=-0.1: it must be at least 0"),
    "momentum that ends above one": (
        {"ema_momentum_end": 1.5},
        "ema_momentum_end=1.5: it must be at most 1",
    ),
    "learning rates that grow downwards": (
        {"layerwise_lr_decay": 1.5},
        "layerwise_lr_decay=1.5: it must be at most 1",
    ),
    "Gram over a batch": ({"gram_over": "batch"}, "gram_over=batch: .* set gram_over=image"),
    "no Gram teacher": (
        {"gram_teacher_every_n_steps": None},
        "gram_loss_weight=0.5: there is no Gram teacher; set gram_teacher_every_n_steps",
    ),
    "nothing to learn": (
        dict.fromkeys(
            ("dino_loss_weight", "ibot_loss_weight", "koleo_loss_weight", "gram_loss_weight"), 0.0
        ),
        "dino_loss_weight, .*: all are 0, so nothing would be learned; set one above 0",
    ),
    "a weight below zero": (
        {"ibot_loss_weight": -1.0},
        "ibot_loss_weight=-1.0: it must be at least 0",
    ),
    "no iteration": ({"sinkhorn_iterations": 0}, "sinkhorn_iterations=0: it must be at least 1"),
    # ---- Models
    "batch norm": (
        {"model": {**MODEL, "_component_": "tiny.normalised_by_batch"}},
        "model: its norm is a BatchNorm1d, .*LayerNorm",
    ),
    "a model of text": ({"model": tiny.MODEL}, "model: it is a TransformerDecoder .*dinov3_vit"),
    "no transformer": (
        {"model": {"_component_": "torch.nn.Linear", "in_features": 2, "out_features": 2}},
        "model: it is a Linear .*dinov3_vit",
    ),
    "heads that do not divide the width": (
        {"model": {**MODEL, "num_heads": 3}},
        "model.num_heads=3: embed_dim=16",
    ),
    # ---- The rest of a run
    "tensor parallel": ({"tensor_parallel_dim": 2}, "tensor_parallel_dim=2: not with images; set it to 1"),
    "in backward": ({"optimizer_in_bwd": True}, "optimizer_in_bwd=True: .* set it to False"),
    "questions": ({"sample_prompts": ["Hi"], "sample_every_n_steps": 1}, "sample_prompts: .* leave the key out"),
    "the best": (
        {"keep_best_checkpoint": True, **HELD_OUT},
        "keep_best_checkpoint=True: .* set export_every_n_steps",
    ),
    "validation on nothing": ({"run_val_every_n_steps": 2}, "set dataset_val, too"),
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


SEVERAL = {
    "a model of text",
    "no transformer",
    "heads that do not divide the width",
    "tensor parallel",
}


def refusal(config):
    cfg = OmegaConf.create(config)
    with pytest.raises((ConfigError, ValueError)) as error:
        recipe_class(recipe=DINO)(cfg).setup(cfg)
    return str(error.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_by_the_name_of_its_key(
    case, tiny_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(DINOv3Checkpointer, "load_checkpoint", lambda self: pytest.fail("reads"))
    changes, text = REFUSED[case]
    config = step_of_16(tiny_config, **{"batch_size": 16, **changes})
    with tiny.samples_of_the_test([{"tokens": [1, 2], "labels": [1, 2]}] * 8):
        found = refusal(config)
    # What makes no model makes no checkpointer either, and so on.
    assert case in SEVERAL or "1 problem" in found, found
    assert re.search(text, found), found
    assert not list(tmp_path.glob("out/*"))


def test_all_that_is_wrong_with_keys_comes_at_once(tiny_config):
    config = step_of_16(tiny_config, batch_size=6, ema_momentum=2, gram_over="batch")
    with pytest.raises(ConfigError) as error:
        recipe_class(recipe=DINO)(OmegaConf.create(config))
    assert [str(problem).split(":")[0] for problem in error.value.problems] == [
        "ema_momentum=2",
        "gram_over=batch",
        "global_batch_size=16",
    ]


def refuse(config):
    return refusal(config)


def test_fewer_microbatches_than_stages_are_named_with_both_numbers(tiny_config):
    config = step_of_16(tiny_config, batch_size=16, pipeline_parallel_dim=2)
    for text in run_distributed(refuse, 2, config):
        assert "pipeline_parallel_dim=2 with 2 stages" in text
        assert "needs 2 microbatches or more per update step, which has 1 of 16 samples" in text


BROKEN = {
    "nan": "image broken.png: its pixels are not all finite",
    "empty": "image broken.png: it has no pixels: 0 x 16",
    "integers": "image broken.png: its pixels are int64; give uint8, uint16, or floats",
    "text": "image broken.png: it must be a picture, or an array",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_image_that_cannot_be_used_is_named_by_its_path(kind, tiny_config):
    config = step_of_16(tiny_config, batch_size=4, global_batch_size=4, **images(kind=kind))
    with pytest.raises(ValueError, match="sample 5 of dataset") as error:
        run_recipe(config, DINO)
    assert BROKEN[kind] in str(error.value)


def test_an_image_that_cannot_be_used_is_left_out_where_that_is_asked_for(tiny_config):
    config = step_of_16(tiny_config, batch_size=4, global_batch_size=4, **images(kind="nan"))
    logged = run_recipe({**config, "on_bad_sample": "skip"}, DINO)
    assert sorted(metrics["effective_global_batch"] for metrics in logged) == [3, 4, 4, 4, 4]


def test_a_path_of_an_empty_and_of_a_broken_file_is_named(tiny_config, tmp_path):
    datasets = pytest.importorskip("datasets")
    pillow = pytest.importorskip("PIL.Image")
    datasets.disable_progress_bars()
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(4):
        pillow.new("L", (16, 16), 40 * index).save(folder / f"{index}.png")
    given = {"dataset": {"_component_": "recipe_utils.data.images.folders.image_folder_dataset"}}
    given["dataset"]["source"] = str(folder)
    config = step_of_16(tiny_config, batch_size=4, global_batch_size=4, **given)
    for content, text in ((b"", "its file is empty"), (b"no picture", "it cannot be decoded")):
        (folder / "2.png").write_bytes(content)
        with pytest.raises(ValueError, match=rf"image .*2\.png: {text}"):
            run_recipe(config, DINO)


def test_heads_of_another_width_than_the_checkpoint_s_are_named(tiny_config):
    config = step_of_16(tiny_config, batch_size=16, max_steps_per_epoch=1)
    run_recipe(config, DINO)
    given = {**config["checkpointer"], "checkpoint_dir": f"{config['output_dir']}/epoch_0"}
    changed = {"ibot_head": {**HEAD, "bottleneck_dim": 7}, "checkpointer": given}
    text = refusal({**config, **changed})
    assert "output.ibot" in text
    assert re.search(r"\(7, 10\).*\(6, 10\)|\(6, 10\).*\(7, 10\)", text), text
