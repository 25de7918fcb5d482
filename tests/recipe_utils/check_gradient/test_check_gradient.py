"""The command accepts right recipes, and exits with 1 for wrong ones, which are edited recipe files."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_transformers
import torch.distributed as dist
from arrays import LAYOUTS
from big_batch import MIXED, STEP_OF_16
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DINO, DPO, KD, SFT, changed_recipe, recipe_of_page, slow, with_adapters

from recipe_utils.check_gradient import __main__ as prove

PACKED = {"microbatching": "packed", "max_tokens_per_microbatch": 64}
TEXTS = {"model": tiny.DEEP_UNTIED_MODEL, **STEP_OF_16, **PACKED}
DISTILLATION = {"_component_": "recipe_utils.distillation.LinearDistillationLoss", "temperature": 2.0}
GROUPS = {"norms", "attention", "MLP", "embeddings", "output"}
SCALE = "step.scale(self.divisor)"
FORWARD = "self.model(**microbatch.inputs, targets=microbatch.targets)"
LEAK = "{k: v for k, v in microbatch.inputs.items() if k != 'document_lengths'}"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in this process; its exit code and the lines that it printed."""

    def call(recipe, config, *options):
        OmegaConf.save(OmegaConf.create(config), tmp_path / "my.yaml")
        argv = ["prove", str(recipe), "--config", str(tmp_path / "my.yaml"), *options]
        monkeypatch.setattr(sys, "argv", argv)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            prove.main()
        screen = capsys.readouterr()
        return end.value.code, (screen.out if end.value.code < 2 else screen.err).splitlines()

    return call


def groups_of(lines):
    """Returns difference and rounding by group."""
    rows = [re.fullmatch(r"  (\w+) +(\S+e\S+) +(\S+e\S+)", line) for line in lines]
    return {row[1]: (float(row[2]), float(row[3])) for row in rows if row}


def assert_equal(found, groups=GROUPS, bound=1e-5):
    code, lines = found
    assert code == 0, lines
    assert lines[-1].startswith("Equal to "), lines
    rows = groups_of(lines)
    assert rows.keys() == set(groups), lines
    assert 0 < max(map(max, rows.values())) < bound, lines


@pytest.mark.parametrize(
    "changes",
    [
        {},
        slow({"dtype": "fp64", "model": tiny.DEEP_MODEL}),
        slow({"microbatching": "least_padding", "enable_activation_checkpointing": True}),
        slow({"dataset": MIXED}),
        slow({"dataset": MIXED, "loss_weights": "datasets"}),
        slow({"dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 40, "packed": True}, **dict.fromkeys(PACKED, ...)}),
    ],
)  # fmt: skip
def test_fine_tuning_equals_single_samples(changes, run, tiny_config):
    config = tiny_config(**{**TEXTS, **changes})
    groups = GROUPS - {"output"} if "model" in changes else GROUPS
    _, lines = found = run(SFT, config)
    assert_equal(found, groups)
    assert re.match(r"update step 1 of .*my: \d+ samples, \d+ target tokens, 1 rank, ", next(x for x in lines if "update step 1 of" in x))  # fmt: skip
    assert not Path(config["output_dir"]).exists()


def test_bf16_is_compared_with_the_rounding_of_bf16(run, tiny_config):
    _, lines = found = run(SFT, tiny_config(**TEXTS, dtype="bf16", weights_dtype="fp32"))
    assert_equal(found, bound=5e-2)
    assert min(map(min, groups_of(lines).values())) > 1e-3


@pytest.mark.parametrize("kind", ["lora", slow({"use_dora": True}), slow({"quantize_base": True, "use_dora": True})])
def test_every_adapter_has_a_gradient_that_equals_single_samples(kind, run, tiny_config):
    changes = {} if kind == "lora" else kind
    model = tiny.adapted(tiny.WIDE_MODEL, lora_dropout=0.1, **changes)
    _, lines = found = run(SFT, tiny_config(**{**TEXTS, "model": model}))
    assert_equal(found, {"adapters"})
    assert any("Dropout of 0.1 is set to 0" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "is_given"),
    [
        ({"sft_loss_weight": 0.3}, False),
        slow({"model": tiny.adapted(tiny.WIDE_MODEL)}, False),
        slow({"model": tiny.adapted(tiny.WIDE_MODEL)}, True),
    ],
)
def test_preference_tuning_equals_single_pairs(changes, is_given, run, tiny_dpo_config, tmp_path):
    config = tiny_dpo_config(**{"model": tiny.DEEP_UNTIED_MODEL, **PACKED, **changes})
    config = with_adapters(config, tmp_path) if is_given else config
    assert_equal(run(DPO, config), {"adapters"} if "model" in changes else GROUPS)


@pytest.mark.parametrize("kind", ["js", *map(slow, ("forward", "reverse", "symmetric"))])
def test_distillation_equals_single_samples(kind, run, tiny_kd_config):
    kd_loss = {**DISTILLATION, "divergence": kind}
    config = tiny_kd_config(kd_ratio=0.3, kd_loss=kd_loss, **TEXTS)
    assert_equal(run(KD, config))


@pytest.mark.parametrize("lora", [False, slow(True)])
def test_decoder_of_transformers_equals_single_samples(lora, run, tiny_config, tmp_path):
    keys = tiny_transformers.save_tiny(tmp_path / "hf", "qwen3")
    if lora:
        keys["model"]["_component_"] = "recipe_utils.models.lora_causal_lm"
    groups = {"adapters"} if lora else GROUPS
    assert_equal(run(SFT, tiny_config(**{**TEXTS, **keys})), groups)


@pytest.mark.parametrize("library", ["torchtune", slow("transformers")])
def test_large_model_is_cut_to_a_few_layers(library, run, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(prove, "MOST_WEIGHTS", 1)
    own = {}
    if library == "transformers":
        own = tiny_transformers.save_tiny(tmp_path / "hf", "qwen3", num_hidden_layers=4)
    _, lines = found = run(SFT, tiny_config(**{**TEXTS, **own}))
    assert_equal(found)
    assert any(re.fullmatch("model: the first 2 of . layers, random weights", x) for x in lines)


MUTANTS = {  # recipe, its line, the wrong one
    "scale 1 % off": (SFT, SCALE, f"0.99 * {SCALE}"),
    "documents leak": (SFT, FORWARD, FORWARD.replace("microbatch.inputs", LEAK)),
    "a microbatch left out": (SFT, "mark_last(microbatches)", "mark_last(microbatches[1:])"),
    "mean over sides": (DPO, 'step.scale("pairs")', 'step.scale("pairs") / 2'),
    "divergence by samples": (KD, 'step.scale("target_tokens")', "step.dp_degree / len(step.microbatches)"),
}  # fmt: skip
IN_FAST_TIER = list(MUTANTS)[:2]


@pytest.mark.parametrize("name", [*IN_FAST_TIER, *map(slow, list(MUTANTS)[2:])])
def test_a_wrong_recipe_is_named(name, run, tiny_config, tiny_dpo_config, tiny_kd_config, tmp_path):
    recipe, right, wrong = MUTANTS[name]
    make = {SFT: tiny_config, KD: tiny_kd_config}.get(recipe)
    config = make(**TEXTS, batch_size=2) if make else tiny_dpo_config(**PACKED)
    code, lines = run(changed_recipe(tmp_path, {right: wrong}, recipe), config)
    assert code == 1, lines
    wrong = {group for group, (difference, rounding) in groups_of(lines).items() if difference > 1e-3}
    assert wrong
    assert lines[-1].startswith("Not equal to ")
    assert wrong == {group for group in GROUPS if group in lines[-1]}


PLAIN_WEIGHTED = {"_component_": "tiny.tiny_dataset", "num_samples": 12, "has_weights": True}
WEIGHTED = [
    {**PLAIN_WEIGHTED, "name": "a", "weight": 1},
    {"_component_": "tiny.tiny_dataset", "num_samples": 12, "seed": 3, "name": "b", "weight": 1, "loss_weight": 2},
]
HIDDEN_LOSS = "## 4. A term of the loss"
WRONG_BESIDE_OWN_SUMS = {
    "scale 1 % off": {SCALE: f"0.99 * {SCALE}"},
    "documents leak": {FORWARD: FORWARD.replace("microbatch.inputs", LEAK)},
    "mean over a row": {"square().mean(1).sum()": "square().mean(1).mean()"},
}


def test_a_term_on_hidden_states_equals_single_samples(run, tiny_config, tmp_path):
    recipe, config = recipe_of_page(tmp_path, HIDDEN_LOSS), tiny_config(**TEXTS)
    _, lines = found = run(recipe, config)
    assert_equal(found)
    assert "Single samples are those of the recipe's own sums: loss, hidden_loss" in lines
    code, lines = run(SFT, config, "--own_sums")
    assert_equal((code, lines))
    assert "Single samples are those of the recipe's own sums: loss" in lines


@pytest.mark.parametrize("name", ["scale 1 % off", *map(slow, list(WRONG_BESIDE_OWN_SUMS)[1:])])
def test_a_wrong_recipe_with_a_term_on_hidden_states_is_named(name, run, tiny_config, tmp_path):
    recipe = recipe_of_page(tmp_path, HIDDEN_LOSS, WRONG_BESIDE_OWN_SUMS[name])
    code, lines = run(recipe, tiny_config(**TEXTS, batch_size=2))
    assert code == 1, lines
    wrong = {group for group, (difference, _) in groups_of(lines).items() if difference > 1e-3}
    assert wrong == {group for group in GROUPS if group in lines[-1]}, lines


@pytest.mark.parametrize("changes", [{}, *map(slow, [{"loss_weights": "datasets"}, {"dataset": PLAIN_WEIGHTED}])])
def test_weights_of_targets_equal_single_samples(changes, run, tiny_config):
    assert_equal(run(SFT, tiny_config(**{**TEXTS, "dataset": WEIGHTED, **changes})))


def prove_on_this_rank(argv, folder, has_group=True):
    """Returns exit code and output of the command under a launcher.

    Without ``has_group`` the recipe makes the process group, as users' recipes do, and ends it.
    """
    screen = io.StringIO()
    if not has_group:
        dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patches, contextlib.redirect_stdout(screen):
        patches.setattr(sys, "argv", argv)
        patches.setenv("TORCHTUNE_UPDATE_STEP_PROVE", folder)
        with pytest.raises(SystemExit) as end:
            prove.main()
    return end.value.code, screen.getvalue().splitlines()


@pytest.mark.parametrize("layout", ["fsdp-2", *map(slow, ("pp-2", "tp-2"))])
def test_two_ranks_equal_single_samples(layout, tiny_config, tmp_path):
    path = tmp_path / "my.yaml"
    OmegaConf.save(OmegaConf.create(tiny_config(**TEXTS, **LAYOUTS[layout][1])), path)
    argv = ["prove", SFT, "--config", str(path)]
    first, second = run_distributed(prove_on_this_rank, 2, argv, str(tmp_path / "prove"))
    assert_equal(first)
    assert any(", 2 ranks, packed, by_document, fp32" in line for line in first[1])
    assert second == (0, [])


@pytest.mark.parametrize("layout", ["fsdp-2", slow("pp-2")])
def test_a_term_on_hidden_states_of_two_ranks_equals_single_samples(layout, tiny_config, tmp_path):
    recipe, path = recipe_of_page(tmp_path, HIDDEN_LOSS), tmp_path / "my.yaml"
    OmegaConf.save(OmegaConf.create(tiny_config(**TEXTS, **LAYOUTS[layout][1])), path)
    argv = ["prove", str(recipe), "--config", str(path)]
    first, second = run_distributed(prove_on_this_rank, 2, argv, str(tmp_path / "prove"), False)
    assert_equal(first)
    assert second == (0, [])


@pytest.mark.slow
def test_launcher_exits_with_1_if_ranks_scale_wrong(tiny_config, tmp_path):
    recipe = changed_recipe(tmp_path, {SCALE: '1 / step.totals["target_tokens"]'})
    OmegaConf.save(OmegaConf.create(tiny_config(**TEXTS)), tmp_path / "my.yaml")
    command = [sys.executable, "-m", "recipe_utils.check_gradient", "--nproc_per_node", "2"]
    command += [str(recipe), "--config", str(tmp_path / "my.yaml")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 1, found.stderr
    differences = [each for each, _ in groups_of(found.stdout.splitlines()).values()]
    assert differences == pytest.approx([0.5] * len(GROUPS), rel=1e-3)


SKIPPED = {"tokens": [1, 2], "labels": [tiny.IGNORE] * 2}
NO_TARGETS = {"_component_": "tiny.tiny_dataset", "num_samples": 4, "replace": {0: SKIPPED}}


@pytest.mark.parametrize(
    ("recipe", "changes", "text"),
    [
        (KD, {"loss": {"_component_": "tiny.SquaredLoss"}}, "loss=tiny.SquaredLoss: not compared beside a teacher"),
        (SFT, {"dataset": NO_TARGETS, "shuffle": False}, "set a larger --num_samples"),
        (DINO, {}, "losses of images are not compared"),
    ],
)
def test_what_cannot_be_compared_is_refused(recipe, changes, text, run, tiny_config):
    code, lines = run(recipe, tiny_config(**{**TEXTS, **changes}), "--num_samples", "1")
    assert code == 2, lines
    assert text in "".join(lines[-3:])
