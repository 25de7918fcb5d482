"""The command accepts right recipes, and exits with 1 for wrong ones, which are edited recipe files."""

import contextlib
import io
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import policies
import pytest
import tiny
import tiny_transformers
import torch
import torch.distributed as dist
from arrays import LAYOUTS
from big_batch import MIXED, STEP_OF_16
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DINO, DPO, KD, POLICY, SFT, changed_recipe, recipe_of_page, slow, with_adapters

from recipe_utils.check_gradient import __main__ as prove

PACKED = {"microbatching": "packed", "max_tokens_per_microbatch": 64}
TEXTS = {"model": tiny.DEEP_UNTIED_MODEL, **STEP_OF_16, **PACKED}
DISTILLATION = {"_component_": "recipe_utils.distillation.LinearDistillationLoss", "temperature": 2.0}
GROUPS = {"norms", "attention", "MLP", "embeddings", "output"}
SCALE = "step.scale(self.declared.divisor)"
FORWARD = "self.model.sums(microbatch)"
LEAK = "replace(microbatch, inputs={k: v for k, v in microbatch.inputs.items() if k != 'document_lengths'})"
HIDDEN_LOSS = "## 4. A term of the loss"


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


PLAIN = {"_component_": "tiny.tiny_dataset", "num_samples": 12}
WEIGHED = {**PLAIN, "has_weights": True}
NAMED = [{**WEIGHED, "name": "a", "weight": 1}, {**PLAIN, "seed": 3, "name": "b", "weight": 1, "loss_weight": 2}]
TREES = {"_component_": "tiny.tiny_tree_dataset", "num_samples": 9}
LORA = partial(tiny.adapted, tiny.WIDE_MODEL)
EXACT = [  # recipe, or "page" for one of "Writing a recipe", and its keys; the first ones run in the fast tier
    (SFT, {"global_batch_size": 8}), (SFT, {"model": LORA(lora_dropout=0.1)}), (SFT, {"dataset": NAMED}),
    (SFT, {"dataset": TREES}), (DPO, {"sft_loss_weight": 0.3}), (KD, {"kd_loss": {**DISTILLATION, "divergence": "js"}}), ("page", {}),
    (SFT, {"dtype": "fp64", "model": tiny.DEEP_MODEL}),
    (SFT, {"microbatching": "least_padding", "enable_activation_checkpointing": True}),
    (SFT, {"dataset": {**PLAIN, "num_samples": 40, "packed": True}, **dict.fromkeys(PACKED, ...)}),
    *((SFT, {"dataset": MIXED, "loss_weights": how}) for how in ("tokens", "datasets")),
    (SFT, {"dataset": NAMED, "loss_weights": "datasets"}), (SFT, {"dataset": WEIGHED}),
    *((SFT, {"model": LORA(use_dora=True, quantize_base=is_nf4)}) for is_nf4 in (False, True)),
    *((DPO, {"reference": how, "prefix_sharing": True}) for how in ("offload", "cached")), (DPO, {"model": LORA()}), (DPO, {"model": LORA(), "given": 1}),
    *((KD, {"kd_loss": {**DISTILLATION, "divergence": kind}}) for kind in ("forward", "reverse", "symmetric")),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "changes"), [*EXACT[:7], *(slow(*each) for each in EXACT[7:])])
def test_an_exact_recipe_is_equal(recipe, changes, run, tiny_config, tiny_dpo_config, tiny_kd_config, tmp_path):
    own = TEXTS if recipe != DPO else {**PACKED, "model": TEXTS["model"]}
    config = {DPO: tiny_dpo_config, KD: tiny_kd_config}.get(recipe, tiny_config)(**{**own, **changes})
    config = with_adapters(config, tmp_path) if config.pop("given", None) else config
    groups = GROUPS - {"output"} if changes.get("model") == tiny.DEEP_MODEL else GROUPS
    groups = {"adapters"} if "lora_" in str(changes) else groups
    _, lines = found = run(recipe_of_page(tmp_path, HIDDEN_LOSS) if recipe == "page" else recipe, config)
    assert_equal(found, groups, 5e-5)
    assert any("Not judged: the sign" in line for line in lines) == (recipe in (DPO, KD))  # of pairs, of another model
    number = 2 if "global_batch_size" in changes else 1  # the last update step of an epoch is not compared
    assert recipe != SFT or any(
        re.match(rf"update step {number} of .*my, after one: \d+ samples, \d+ ", x) for x in lines
    )
    assert not Path(config["output_dir"]).exists()


@pytest.mark.parametrize(
    ("loss", "model", "left_out"),
    [
        ({"kl_weight": 0.3, "kl": "k3", "kind": "cispo"}, TEXTS["model"], ["logprobs"]),
        slow({"kl_weight": 0.3}, LORA(), []),
        slow({"kind": "sequence", "normaliser": "prompts"}, TEXTS["model"], []),
    ],
)
def test_groups_of_rollouts_are_compared_with_padded_answers(loss, model, left_out, run, tiny_config, tmp_path):
    groups = policies.make_groups(16)
    groups = policies.of_whole_answers(groups) if loss.get("kind") == "sequence" else groups
    policies.write(tmp_path / "rollouts.jsonl", groups, ["ref_logprobs", "advantage", *left_out])
    data = {"_component_": "recipe_utils.policy.rollout_dataset", "path": str(tmp_path / "rollouts.jsonl")}
    loss = {"_component_": "recipe_utils.policy.PolicyLoss", **loss}
    config = tiny_config(**{**TEXTS, "global_batch_size": 8, "dataset": data, "loss": loss, "model": model})
    _, lines = found = run(POLICY, config)
    assert_equal(found, {"adapters"} if model == LORA() else GROUPS, bound=5e-5)
    assert [line for line in lines if "Not judged: the sign" in line] == [
        "Not judged: the sign of the term of old: a ratio is no divergence."
    ] * bool(left_out)


def test_bf16_is_compared_with_the_rounding_of_bf16(run, tiny_config):
    _, lines = found = run(SFT, tiny_config(**TEXTS, dtype="bf16", weights_dtype="fp32"))
    assert_equal(found, bound=5e-2)
    assert min(map(min, groups_of(lines).values())) > 1e-3


@pytest.mark.parametrize("lora", [False, slow(True)])
def test_decoder_of_transformers_equals_single_samples(lora, run, tiny_config, tmp_path):
    keys = tiny_transformers.save_tiny(tmp_path / "hf", "qwen3")
    if lora:
        keys["model"]["_component_"] = "recipe_utils.models.lora_causal_lm"
    groups = {"adapters"} if lora else GROUPS
    assert_equal(run(SFT, tiny_config(**{**TEXTS, **keys})), groups)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_fusion_model", "adapted_fusion_model"])
def test_samples_with_images_equal_single_samples(model, run, tiny_config, weights_folder):
    torch.save(tiny.tiny_fusion_model().state_dict(), weights_folder / "weights" / "fusion.pt")
    data = {"_component_": "tiny.tiny_image_dataset", "num_samples": 9}
    config = tiny_config(
        model={"_component_": f"tiny.{model}"}, dataset=data, collate_fn="tiny.collate_images", batch_size=2
    )
    config["checkpointer"]["checkpoint_files"] = ["fusion.pt"]
    assert_equal(run(SFT, config), {"adapters"} if "adapted" in model else {*GROUPS, "other"})


@pytest.mark.parametrize("library", ["torchtune", slow("transformers")])
def test_large_model_is_cut_to_a_few_layers(library, run, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(prove, "MOST_WEIGHTS", 1)
    own = {}
    if library == "transformers":
        own = tiny_transformers.save_tiny(tmp_path / "hf", "qwen3", num_hidden_layers=4)
    _, lines = found = run(SFT, tiny_config(**{**TEXTS, **own}))
    assert_equal(found)
    assert any(re.fullmatch("model: the first 2 of . layers, random weights", x) for x in lines)


TWICE = """class Twice(UpdateStepLoader):
    def _prepare(self, *args):
        for step in super()._prepare(*args):
            yield replace(step, totals={name: 2 * total for name, total in step.totals.items()})


class FullFinetuneRecipe:"""
MODEL = "        # Model: it ends"
MUTANTS = {  # recipe, its lines -> wrong ones, and the problem beside groups of parameters
    "scale 2 % off": (SFT, {SCALE: f"0.98 * {SCALE}"}, "sum 1 is multiplied by 0.98 / "),
    "loss is logged by another scale": (SFT, {"return scaled[0]": "return 0.98 * scaled[0]"}, "sum 1 is multiplied by 0.98 / "),
    "documents leak": (SFT, {FORWARD: FORWARD.replace("microbatch", LEAK, 1), "import torch\n": "from dataclasses import replace\n\nimport torch\n"}, ""),
    "turns of trees leak": (SFT, {FORWARD: FORWARD.replace("microbatch", LEAK, 1), "import torch\n": "from dataclasses import replace\n\nimport torch\n"}, ""),
    "a microbatch left out": (SFT, {"mark_last(microbatches)": "mark_last(microbatches[1:])"}, "15 of 16 samples have a backward"),
    "counted twice": (SFT, {"class FullFinetuneRecipe:": TWICE, MODEL: f"        self.loader = Twice(**vars(self.loader))\n{MODEL}",
        "import torch\n": "from dataclasses import replace\n\nimport torch\nfrom recipe_utils.update_steps.loader import UpdateStepLoader\n"},
        r"weights is 210.*, single samples have 105"),
    "mean over sides": (DPO, {'step.scale("pairs")': 'step.scale("pairs") / 2'}, "sum 1 is multiplied by 0.5 / pairs"),
    "divergence by samples": (KD, {'step.scale("target_tokens")': "step.dp_degree / len(step.microbatches)"}, "sum 1 is multiplied by"),
    "mean over a row": ("page", {"square().mean(1).sum()": "square().mean(1).mean()"}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", [*list(MUTANTS)[:6], *map(slow, list(MUTANTS)[6:])])
def test_a_wrong_recipe_is_named(name, run, tiny_config, tiny_dpo_config, tiny_kd_config, tmp_path):
    recipe, changes, problem = MUTANTS[name]
    of_texts = tiny_config(**{**TEXTS, **({"dataset": TREES} if "trees" in name else {})})
    config = {DPO: tiny_dpo_config(**PACKED), KD: tiny_kd_config(**TEXTS)}.get(recipe, of_texts)
    is_page = recipe == "page"
    recipe = recipe_of_page(tmp_path, HIDDEN_LOSS, changes) if is_page else changed_recipe(tmp_path, changes, recipe)
    code, lines = run(recipe, config)
    assert code == 1, lines
    wrong = {group for group, (difference, _) in groups_of(lines).items() if difference > 1e-3}
    assert wrong == {group for group in GROUPS if group in lines[-1]}, lines
    assert wrong or problem
    assert lines[-1].startswith("Not ")
    assert any(re.match(f"Wrong: .*{problem}", line) for line in lines) == bool(problem), lines


# ---- A divergence from a frozen model, whose gradient at the start is 0

KL = "## 11. A pass before the pass"
OF_ADAPTERS = {  # the frozen model is the trained one without its adapters
    """        start = models.frozen_copy("start", meta_model, log_probs, built.checkpointer, settings.model, ranks, rows)
""": """        start = models.trained_model(self.model, "start", lambda: disable_adapter(self.model.module))
""",
    "\nfrom recipe_utils.losses import LinearLogProbs\n": "\nfrom torchtune.modules.peft import disable_adapter\nfrom recipe_utils.losses import LinearLogProbs\n",
    "        log_ratio = ": """        if "start" not in targets.outputs:
            return log_probs
        log_ratio = """,
}  # fmt: skip
ITSELF = {  # the outputs are those of the weights that are trained
    **OF_ADAPTERS, ", lambda: disable_adapter(self.model.module))": ")", "from torchtune.modules.peft import disable_adapter\n": "",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "weight"), [("copy", 0.1), ("adapters", 0.1), slow("copy", 0), slow("itself", 0.1)])
def test_a_divergence_of_the_wrong_sign_is_named(kind, weight, run, tiny_config, tmp_path):
    model = {"copy": TEXTS["model"]}.get(kind, LORA())
    changes = {"copy": {}, "adapters": OF_ADAPTERS, "itself": ITSELF}[kind]
    has_influence = bool(weight and kind != "itself")
    for sign in (1, -1):
        recipe = recipe_of_page(tmp_path, KL)
        for before, after in {**changes, "0.1 * kl": f"{sign * weight} * kl"}.items():
            recipe = changed_recipe(tmp_path, {before: after}, recipe)
        code, lines = run(recipe, tiny_config(**{**TEXTS, "model": model}))
        assert code == (has_influence and sign < 0), lines
        assert any("Wrong: sign: the term of start" in line for line in lines) == bool(code)
        assert any("Not judged: the sign of the term of start" in line for line in lines) == (not has_influence)


def prove_on_this_rank(argv, folder):
    """Returns exit code and output of the command under a launcher, where the recipe makes the process group."""
    screen = io.StringIO()
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patches, contextlib.redirect_stdout(screen):
        patches.setattr(sys, "argv", argv)
        patches.setenv("TORCHTUNE_UPDATE_STEP_PROVE", folder)
        with pytest.raises(SystemExit) as end:
            prove.main()
    return end.value.code, screen.getvalue().splitlines()


@pytest.mark.parametrize(
    ("layout", "kind"), [("fsdp-2", "page"), ("fsdp-2", "twice"), slow("pp-2", "page"), slow("tp-2", SFT)]
)
def test_two_ranks_equal_single_samples(layout, kind, tiny_config, tmp_path):
    path, recipe = tmp_path / "my.yaml", SFT
    OmegaConf.save(OmegaConf.create(tiny_config(**TEXTS, **LAYOUTS[layout][1])), path)
    if kind == "twice":  # each rank counts as many times as there are ranks
        recipe = changed_recipe(tmp_path, {SCALE: f"self.ranks.dp_degree * {SCALE}"})
    elif kind == "page":
        recipe = recipe_of_page(tmp_path, HIDDEN_LOSS)
    argv = ["prove", str(recipe), "--config", str(path)]
    (code, lines), second = run_distributed(prove_on_this_rank, 2, argv, str(tmp_path / "prove"))
    assert any(", 2 ranks, packed, by_document, fp32" in line for line in lines)
    assert second == (0, [])
    if kind == "twice":
        assert code == 3
        assert [each for each, _ in groups_of(lines).values()] == pytest.approx([1] * len(GROUPS), rel=1e-3)
    else:
        assert_equal((code, lines))


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
        (
            POLICY,
            {"dataset": {"path": ".", "groups_per_round": 3}},
            "dataset.groups_per_round: rounds are not compared",
        ),
        (SFT, {"dataset": NO_TARGETS, "shuffle": False}, "set a larger --num_samples"),
        (DINO, {}, "losses of images are not compared"),
    ],
)
def test_what_cannot_be_compared_is_refused(recipe, changes, text, run, tiny_config):
    code, lines = run(recipe, tiny_config(**{**TEXTS, **changes}), "--num_samples", "1")
    assert code == 2, lines
    assert text in "".join(lines[-3:])
