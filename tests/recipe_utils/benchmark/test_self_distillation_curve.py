import json

import pytest

from recipe_utils.benchmark.self_distillation_curve import (
    Training,
    accuracy_of_pixels,
    largest_spread,
    main,
    trainings_of,
)

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def test_one_microbatch_is_trained_once_and_other_splits_both_ways():
    found = trainings_of(["64x1", "8x8"])
    assert found == [Training("64x1", "exact"), Training("8x8", "exact"), Training("8x8", "naive")]


def test_all_exact_splits_have_one_objective():
    exact = [Training(split, "exact").overrides(150, 10) for split in ("64x1", "2x32")]
    differs = {key for key in exact[0] if exact[0][key] != exact[1][key]}
    assert differs == {"batch_size", "gradient_accumulation_steps"}
    naive = Training("2x32", "naive").overrides(150, 10)
    differs = {key for key in naive if naive[key] != exact[1][key]}
    assert differs == {"koleo_group_size", "sinkhorn_over"}


@pytest.mark.parametrize(("steps", "expected"), [(2, 2), (22, 22), (150, 154), (418, 418)])
def test_it_trains_as_many_update_steps_as_asked_for_or_somewhat_more(steps, expected):
    changes = Training("64x1", "exact").overrides(steps, 10)
    assert changes["epochs"] * changes["max_steps_per_epoch"] == expected


def test_the_spread_is_the_largest_at_one_update_step():
    assert largest_spread([{1: 0.5, 2: 0.8}, {1: 0.75, 2: 0.7}]) == 0.25


def test_raw_pixels_tell_digits_apart():
    assert 0.97 < accuracy_of_pixels() < 0.985


def test_it_draws_a_chart_and_keeps_the_figures(tmp_path, capsys):
    small = ["model.num_layers=1", "model.embed_dim=16", "transform.num_local_crops=1"]
    arguments = [
        "--out", str(tmp_path), "--steps", "2", "--val_every", "1", "--splits", "64x1", "32x2", "--set", *small,
    ]  # fmt: skip
    main(arguments)
    assert (tmp_path / "self_distillation_curve.png").stat().st_size > 10_000
    written = json.loads((tmp_path / "self_distillation_curve.json").read_text())
    by_training = {
        (each["split"], each["way"]): each["by_update_step"] for each in written["knn_accuracy"]
    }
    assert by_training.keys() == {("64x1", "exact"), ("32x2", "exact"), ("32x2", "naive")}
    assert all(list(curve) == ["1", "2"] for curve in by_training.values())
    assert by_training["64x1", "exact"] == pytest.approx(by_training["32x2", "exact"], abs=0.01)
    assert "| 32x2 | " in capsys.readouterr().out
    before = (tmp_path / "exact_64x1" / "logs" / "metrics.jsonl").stat().st_mtime_ns
    main(arguments)  # what is there is not done again
    assert (tmp_path / "exact_64x1" / "logs" / "metrics.jsonl").stat().st_mtime_ns == before
