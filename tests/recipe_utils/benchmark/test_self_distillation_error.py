import pytest
import torch

from recipe_utils.benchmark.self_distillation_error import (
    TERMS,
    Contest,
    arithmetic_of,
    errors_of,
    forward_backward,
    kept_of,
    main,
    row_of_crops,
    sizes_of,
    split_by_size,
)
from recipe_utils.data.images.crop_rows import layout_of
from recipe_utils.model.vision.vision_transformer import dinov3_vit, fresh_vit_weights
from recipe_utils.parallel.ranks import RankSettings, join_ranks

pytest.importorskip("sklearn")
SMALL = {"model.embed_dim": 16, "model.num_layers": 1, "dino_head.num_prototypes": 24}


@pytest.fixture
def ranks():
    joined = join_ranks(RankSettings(device="cpu"))
    yield joined
    joined.leave()


def test_a_split_is_said_by_its_shape_or_one_by_one():
    assert sizes_of("4x2") == [4, 4]
    assert sizes_of("7+5+4") == [7, 5, 4]


def test_the_exact_way_has_the_gradient_of_one_batch_and_the_naive_one_has_not(ranks):
    contest = Contest(SMALL, 8, "fp64", ranks)
    whole, halves, uneven, ones = errors_of(contest, [[8], [4, 4], [5, 3], [1] * 8])
    for errors in (whole, halves, uneven, ones):
        assert errors.exact.keys() == errors.naive.keys() == TERMS.keys()
        assert max(errors.exact.values()) < 1e-12
    assert max(whole.naive.values()) < 1e-12
    assert max(whole.variation) < 1e-12
    for errors in (halves, uneven, ones):
        assert min(errors.naive.values()) > 5e-2
        assert min(errors.variation) > 1e-2
    assert ones.naive["KoLeo"] == 1  # no image has a neighbour, so there is no gradient


def test_calls_for_each_size_of_crops_have_the_gradient_of_one_row():
    model = dinov3_vit(16, 32, 1, 1)
    model.load_state_dict(fresh_vit_weights(model, 0))
    microbatch = row_of_crops(layout_of(model), (64, 32), 1)
    assert microbatch.inputs["crop_groups"] == ((2, 21), (8, 9))
    torch.testing.assert_close(
        forward_backward(model, microbatch.inputs),
        forward_backward(model, *split_by_size(microbatch)),
    )


def test_bottlenecks_are_kept_and_no_tensor_has_all_logits(ranks):
    sizes = {"dino_head.bottleneck_dim": 32, "ibot_head.bottleneck_dim": 32}
    contest = Contest(SMALL | sizes | {"ibot_head.num_prototypes": 4096}, 16, "fp32", ranks)
    microbatches = contest.microbatches([8, 8])
    num_masked = sum(microbatch.counts["masked_patches"] for microbatch in microbatches)
    kept = kept_of(contest, [8, 8])
    assert kept.bottlenecks == (32 + num_masked) * 32 * 4
    assert kept.logits == (32 * 24 + num_masked * 4096) * 4
    assert kept.largest < kept.logits


def test_the_arithmetic_counts_crops_and_masked_patches():
    bottlenecks, logits = arithmetic_of("vit/L16_dinov3_update_step", 64)
    num_rows = 128 + 128 * 0.5 * 0.3 * 256
    assert bottlenecks == pytest.approx(num_rows * 256 * 2)
    assert logits == pytest.approx(num_rows * 65_536 * 4)


def test_the_tables_have_a_row_for_each_split(capsys):
    main(
        ["--parts", "error", "time", "--num_images", "4", "--splits", "2x2", "1+3", "--timed_splits", "4x1",
         "--num_rounds", "1", "--cpu_time"]
    )  # fmt: skip
    rows = [
        line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line[:1] == "|"
    ]
    errors, times = rows[2:4], rows[6:]
    assert [row[0].strip() for row in errors] == ["2x2", "1+3"]
    assert all(float(row[-1]) < 1e-12 for row in errors)
    assert [row[0].strip() for row in times] == ["4x1"]


def test_splits_of_another_number_of_images_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--num_images", "8", "--splits", "4x2", "3x2"])
    assert "--num_images 8: 3x2 has another number" in capsys.readouterr().err
