"""Summary and progress bar name what is counted: tokens or images."""

import os
from dataclasses import replace

from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.dinov3.loaders import IMAGES
from recipe_utils.training.checkpointing import remove_old_exports, summary_of_metrics, summary_of_training
from recipe_utils.training.log import TEXT, Log, bar_text


def test_the_summary_of_images_counts_images():
    start = TrainingState("recipe", 0, 0, 0, seed=0)
    images = replace(start, global_step=64, num_seen={"images": 4096})
    assert summary_of_training(start, images, 58.5, IMAGES) == "64 update steps, 4,096 images in 00:58 (70 images/s)"


def test_the_summary_after_a_resume_is_of_both_parts_and_counts_skipped_samples():
    first = TrainingState("recipe", 36, 0, 0, seed=0, num_seen={"tokens": 1000})
    last = replace(first, global_step=93, num_seen={"tokens": 5096}, num_samples_skipped=3)
    assert summary_of_training(first, last, 61.0, TEXT) == (
        "57 update steps, 4,096 target tokens in 01:01 (67 tokens/s); 93 and 5,096 in all, before the "
        "resume included; skipped samples: 3"
    )


def test_the_best_validation_is_the_lowest_loss_or_the_highest_accuracy():
    lines = [{"step": step, "val_loss": v} for step, v in ((2, 3.0), (4, 1.0), (6, 2.0))]
    assert [*summary_of_metrics(lines, TEXT)] == ["val_loss: first 3.000, last 2.000, best 1.000 (update step 4)"]
    lines = [{"step": step, "knn_accuracy": v} for step, v in ((2, 0.0), (4, 0.9), (6, 0.9))]
    text = "knn_accuracy: first 0.000, last 0.900, best 0.900 (update step 4)"
    assert [*summary_of_metrics([*lines, {"step": 8, "knn_accuracy": None}], IMAGES)] == [text]


def test_the_summary_compares_a_tenth_of_the_update_steps_at_each_end():
    lines = [{"step": step, "loss": float(step), "val_loss": None} for step in range(1, 21)]
    assert [*summary_of_metrics(lines, TEXT)] == ["loss: first 1.500, last 19.500 (means of 2 log lines)"]


def test_the_bar_shows_the_rate_over_all_ranks_of_what_is_counted():
    of_text = {"loss": 1.5, "grad_norm": 12.34, "tokens_per_second_per_gpu": 4000.0, "val_loss": 2.25}
    text = "epoch 1 of 3 | loss 1.500 | norm 12.3 | 8.00k tok/s | 1.5 GiB | val 2.25 "
    assert bar_text(0, 3, of_text, TEXT, 2, 3 << 29) == text
    of_images = {"images_per_second_per_gpu": 35.0, "knn_accuracy": 0.8812}
    assert bar_text(1, 2, of_images, IMAGES, 2) == "epoch 2 of 2 | 70.0 img/s | knn 0.881 "


def test_only_the_newest_exports_and_the_best_are_kept(tmp_path):
    names = ("best", "epoch_0", "export_step_12", "epoch_1", "step_12", "epoch_of_mine")
    for age, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    remove_old_exports(tmp_path, 2, Log(tmp_path / "logs", is_shown=True))
    assert {each.name for each in tmp_path.iterdir()} == {*names} - {"epoch_0"}
    remove_old_exports(tmp_path, 1, Log(tmp_path / "logs", is_shown=True))
    assert {each.name for each in tmp_path.iterdir()} == {*names} - {"epoch_0", "export_step_12"}
