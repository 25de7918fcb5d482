"""Pipeline stages change neither curves nor files; test_gradients.py has their gradients and losses."""

import zipfile

import pytest
import tiny
from distributed_runs import run_distributed
from recipe_runs import (
    STOCK_LOSS,
    changed_recipe,
    exported_model,
    recipe_of_page,
    refusal,
    run_recipe,
    run_recipe_keeping_warnings,
    run_recipes,
    slow,
    writing_to,
)

PP_2 = {"pipeline_parallel_dim": 2}


def curve_config(tiny_config, sizes, **changes):
    return tiny_config(
        **{
            "model": sizes,
            "dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 92},
            "dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 23, "seed": 5},
            "run_val_every_n_steps": 3,
            "clip_grad_norm": 0.5,
            "dtype": "fp64",
            "batch_size": 2,
            "global_batch_size": 16,
            "gradient_accumulation_steps": ...,
            **changes,
        }
    )


def figures(logged):
    """Returns losses, validation losses and gradient norms in the order of the log, and the counted tokens."""
    keys = ("loss", "val_loss", "grad_norm", "num_tokens")
    return [(m["step"], key, m[key]) for m in logged for key in keys if key in m]


def assert_same_curve(logged, expected, rel=1e-5):
    assert [figure[:2] for figure in logged] == [figure[:2] for figure in expected]
    assert [value for *_, value in logged] == pytest.approx([value for *_, value in expected], rel=rel)


MODELS = {"tied": tiny.DEEP_MODEL, "untied": tiny.DEEP_UNTIED_MODEL}
CURVES = {  # model, ranks, and keys of configs whose curves are that of one process
    "fast": ("tied", 2, [PP_2]),
    "pp-2": (
        "untied",
        2,
        [
            {**PP_2, "pipeline_parallel_schedule": "Interleaved1F1B", "prefetch_update_steps": 0},
            {**PP_2, "pipeline_parallel_schedule": "GPipe", "ac_mode": "selective", "ac_option": 2},
            {**PP_2, "pipeline_parallel_split_points": [1]},
            {**PP_2, "loss": STOCK_LOSS},
            {**PP_2, "loss": {"_component_": "torch.nn.CrossEntropyLoss"}},
        ],
    ),
    "pp-2-dp-2": ("untied", 4, [{**PP_2, "custom_sharded_layers": ["tok_embeddings", "output"]}]),
}


@pytest.fixture(scope="module")
def one_process(module_config):
    """Returns by model the log of 6 update steps of one process without stages."""
    configs = [curve_config(module_config, sizes) for sizes in MODELS.values()]
    (curves,) = run_distributed(run_recipes, 1, configs)
    return dict(zip(MODELS, map(figures, curves), strict=True))


@pytest.mark.parametrize("layout", ["fast", *map(slow, list(CURVES)[1:])])
def test_the_curve_is_that_of_one_process(layout, tiny_config, one_process):
    """Losses, validation losses, norms over all stages and counts are equal; the last step is short."""
    model, world_size, changes = CURVES[layout]
    configs = [curve_config(tiny_config, MODELS[model], **each) for each in changes]
    for logged in run_distributed(run_recipes, world_size, configs)[0]:
        assert_same_curve(figures(logged), one_process[model])


@pytest.mark.slow
def test_the_exported_model_is_the_same_file(tiny_config, tmp_path):
    """The learning rate is 0, or the last digits would differ."""
    exported = []
    for name, world_size, dims in (("one", 1, {}), ("stages", 2, PP_2)):
        sgd = {"_component_": "torch.optim.SGD", "lr": 0.0}
        config = curve_config(tiny_config, tiny.DEEP_MODEL, optimizer=sgd, **dims)
        config = writing_to(tmp_path / name, config)
        run_distributed(run_recipe, world_size, config)
        # Not the bytes between the parts, whose padding is random.
        with zipfile.ZipFile(exported_model(config)) as parts:
            exported.append([(part, parts.read(part)) for part in parts.namelist()])
    assert exported[0] == exported[1]


@pytest.mark.slow
def test_too_few_microbatches_are_warned_of_once(tiny_config):
    """There is one row for two stages; a microbatch without targets is added."""
    changes = {"microbatching": "packed", "batch_size": 16, "max_tokens_per_microbatch": 1000}
    config = curve_config(tiny_config, tiny.DEEP_MODEL, **changes, **PP_2)
    (_, warnings), _ = run_distributed(run_recipe_keeping_warnings, 2, config)
    (few,) = [text for text in warnings if "idle" in text]
    assert "pipeline_parallel_dim=2: a step of 1 microbatches" in few


BAD = {
    "more stages than layers": ({"model": tiny.MODEL, "pipeline_parallel_schedule": "Interleaved1F1B"}, "4 stages need as many layers, the model has 2"),
    "in backward": ({"optimizer_in_bwd": True}, "optimizer_in_bwd=True: pipeline_parallel_dim=2"),
}  # fmt: skip


def refusals(configs):
    return [refusal(config) for config in configs]


def test_impossible_pipelines_are_refused_with_what_to_set_instead(tiny_config):
    configs = [
        curve_config(tiny_config, **{"sizes": tiny.DEEP_MODEL, **PP_2, **changes}) for changes, _ in BAD.values()
    ]
    for texts in run_distributed(refusals, 2, configs):
        for (_, expected), text in zip(BAD.values(), texts, strict=True):
            assert expected in text


def test_an_edit_of_the_objective_counts_in_stages_too(tiny_config, tmp_path):
    config = curve_config(
        tiny_config, tiny.DEEP_MODEL, max_steps_per_epoch=2, run_val_every_n_steps=None, dataset_val=None
    )
    recipe = changed_recipe(tmp_path, {"return scaled[0]": "return 3.0 * scaled[0]"})
    plain, *edited = (
        run_distributed(run_recipe, size, {**config, "pipeline_parallel_dim": size}, *args)[0]
        for size, args in ((1, ()), (1, (recipe,)), (2, (recipe,)))
    )
    norms = [[metrics["grad_norm"] for metrics in logged] for logged in (plain, *edited)]
    assert norms[1] == pytest.approx(norms[2], rel=1e-9)
    assert norms[1][0] == pytest.approx(3 * norms[0][0], rel=1e-9)


def test_a_loss_without_a_backward_in_parts_is_refused_in_setup(tiny_config, tmp_path):
    recipe = recipe_of_page(tmp_path, "## 14. A pass of the trained model")
    schedule = {"pipeline_parallel_schedule": "InterleavedZeroBubble", "global_batch_size": 8}
    config = tiny_config(model=tiny.DEEP_MODEL, gradient_accumulation_steps=..., **PP_2, **schedule)
    for text in run_distributed(refusal, 2, config, recipe):
        assert "InterleavedZeroBubble: FocalLoss has no backward in two parts; set it to 1F1B" in text
