"""A module that a recipe adds to the decoder is initialized, sharded, trained, saved, resumed and exported."""

import re
import sys

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import changed_recipe, exported_model, keep_messages, losses, recipe_of_page, run_recipe, writing_to
from safetensors.torch import load_file

from recipe_utils.check_gradient import __main__ as check_gradient
from recipe_utils.checkpoint.own_modules import fresh_weights

LOSS = {"_component_": "recipe_utils.losses.LinearCrossEntropyLoss"}
UNTRAINED = {"_component_": "torch.optim.SGD", "lr": 0.0}
CHANGES = {
    '        loss_fn = build("loss"': '''        built.meta_model.value_head = torch.nn.Linear(32, 1, device="meta")
        built = built.with_own_modules("value_head")
        loss_fn = build("loss"''',
    "lambda stage: loss_fn": "lambda stage: WithValues(loss_fn, stage.value_head)",
    "\n\n@training.entry_point": '''

class WithValues:
    """Sums cross-entropy, and squared errors of values whose target is 1."""

    takes_hidden_states = True

    def __init__(self, loss_fn, value_head):
        self.loss_fn, self.value_head = loss_fn, value_head

    def __call__(self, output, hidden, targets, backward_in_parts=False):
        values = self.value_head(hidden.flatten(0, 1).index_select(0, targets.positions))
        return self.loss_fn(output, hidden, targets, backward_in_parts) + (values - 1).square().sum()


@training.entry_point''',
}


@pytest.fixture
def recipe(tmp_path):
    return changed_recipe(tmp_path, CHANGES)


def own_weights(config):
    return load_file(exported_model(config).parent / "own_modules" / "weights.safetensors")


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_dim": 2}], ids=["FSDP2", "pipeline"])
def test_a_value_head_is_trained_alike_on_any_layout(recipe, layout, tiny_config, tmp_path):
    config = tiny_config(max_steps_per_epoch=3, gradient_accumulation_steps=..., global_batch_size=8)
    of_two = writing_to(tmp_path / "two", {**config, **layout})
    one, (two, _) = run_recipe(config, recipe), run_distributed(run_recipe, 2, of_two, recipe)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    own, other = own_weights(config), own_weights(of_two)
    assert {name: [*weight.shape] for name, weight in own.items()} == {
        "value_head.weight": [1, 32], "value_head.bias": [1]
    }  # fmt: skip
    for name, weight in own.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-3, atol=1e-5)
    fresh = fresh_weights("value_head", torch.nn.Linear(32, 1, device="meta"), config["seed"])
    assert all((own[name] - weight).abs().max() > 0.01 for name, weight in fresh.items())


@pytest.mark.parametrize("model", [tiny.MODEL, tiny.adapted(tiny.MODEL)], ids=["full", "lora"])
def test_a_value_head_resumes_and_is_read_from_an_export(model, recipe, tiny_config, tmp_path):
    config = tiny_config(model=model, epochs=2, max_steps_per_epoch=2)
    of_resumed = writing_to(tmp_path / "resumed", config)
    whole = losses(run_recipe(config, recipe))
    run_recipe({**of_resumed, "epochs": 1, "save_every_n_steps": 1}, recipe)
    assert losses(run_recipe({**of_resumed, "resume_from_checkpoint": True}, recipe)) == whole[2:]
    assert all(map(torch.equal, own_weights(config).values(), own_weights(of_resumed).values()))

    file = exported_model(config)
    assert not any("value_head" in name for name in torch.load(file, weights_only=True))  # that of a decoder
    from_export = writing_to(tmp_path / "again", {**config, "epochs": 1, "seed": 7, "optimizer": UNTRAINED})
    from_export["checkpointer"] |= {"checkpoint_dir": str(file.parent), "checkpoint_files": [file.name]}
    run_recipe(from_export, recipe)
    assert all(map(torch.equal, own_weights(config).values(), own_weights(from_export).values()))


def test_a_module_without_initial_values_is_refused():
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(3, device="meta"))])
    with pytest.raises(ValueError, match=r"a ParameterList of scales has no reset_parameters\(\)"):
        fresh_weights("scales", module, 0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layers_that_setup_freezes_keep_their_weights_in_pipelines_too(num_ranks, tiny_config, tmp_path):
    recipe = recipe_of_page(tmp_path, "## 2. Freeze layers")
    config = tiny_config(model=tiny.UNTIED_MODEL, max_steps_per_epoch=2, pipeline_parallel_dim=num_ranks)
    (_, messages), *_ = run_distributed(run_recipe_keeping_messages, num_ranks, config, recipe)
    assert any(message.startswith("Model: ") and "of them trained" in message for message in messages)
    before = tiny.tiny_model(tiny.UNTIED_MODEL).state_dict()
    after = torch.load(exported_model(config), weights_only=True)
    kept = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    assert kept == {name for name in before if name.startswith(("tok_embeddings.", "layers.0.attn."))}


def run_recipe_keeping_messages(config, recipe):
    with keep_messages() as messages:
        return run_recipe(config, recipe), messages


# ---- The reward model of the page ---------------------------------------------------------------


def reward_recipe(folder):
    return recipe_of_page(folder, "## 7. Another objective")


def expected_reward_loss(pairs, seed):
    model, hidden = tiny.tiny_model().double(), []
    model.norm.register_forward_hook(lambda _, __, states: hidden.append(states))
    weights = fresh_weights("value_head", torch.nn.Linear(32, 1, device="meta"), seed)
    total = 0
    for pair in pairs:
        rewards = []
        for side in ("chosen", "rejected"):
            model(torch.tensor(pair[f"{side}_input_ids"])[None])
            rewards.append(hidden[-1][0, -1].double() @ weights["value_head.weight"][0].double())
        total -= torch.nn.functional.logsigmoid(rewards[0] - rewards[1]).item()
    return total / len(pairs)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {"microbatching": "packed", "max_tokens_per_microbatch": 64}),
        (2, {"microbatching": "least_padding"}),
        (2, {"pipeline_parallel_dim": 2}),
    ],
)
def test_the_reward_model_of_the_page_is_exact_on_any_layout(world_size, layout, tiny_dpo_config, tmp_path):
    data = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 12}
    batch = {"batch_size": 2, "global_batch_size": 12, "gradient_accumulation_steps": ...}
    config = tiny_dpo_config(dataset=data, loss=LOSS, ref_checkpointer=..., dtype="fp64", **batch, **layout)
    args = config, reward_recipe(tmp_path)
    (logged, messages), *_ = run_distributed(run_recipe_keeping_messages, world_size, *args)
    with tiny.float64_throughout():
        expected = expected_reward_loss(tiny.tiny_pair_dataset(tiny.tiny_tokenizer(), 12), config["seed"])
    assert losses(logged) == pytest.approx([expected], rel=1e-6)
    assert own_weights(config).keys() == {"value_head.weight", "value_head.bias"}
    assert not any("Sample from it" in message for message in messages)


def test_the_gradient_of_the_reward_model_equals_single_pairs(tiny_dpo_config, tmp_path, monkeypatch, capsys):
    data = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 12}
    packed = {"microbatching": "packed", "max_tokens_per_microbatch": 64, "global_batch_size": 12}
    config = tiny_dpo_config(dataset=data, loss=LOSS, ref_checkpointer=..., gradient_accumulation_steps=..., **packed)
    OmegaConf.save(OmegaConf.create(config), tmp_path / "my.yaml")
    argv = ["check_gradient", reward_recipe(tmp_path), "--config", str(tmp_path / "my.yaml")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as end:
        check_gradient.main()
    screen = capsys.readouterr().out
    assert end.value.code == 0, screen
    assert re.search(r"\n  other +\d", screen)  # the value head
