"""Objectives of an author's own, in copied recipes or of the page, are those of single samples in every layout."""

import re
import shutil
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import tiny
import torch
from arrays import LAYOUTS
from big_batch import DATA, STEP_OF_16, metrics_and_gradients, samples_of, steps_of, targets_of
from distributed_runs import run_distributed
from gradient_rows import RECOMPUTED, assert_steps, folder_keys, run_row_in, spanning
from own_objectives import BalancedLoss, Noise, likeliest_tokens
from recipe_runs import SFT, changed_recipe, section_of, slow, tiny_config, writing_to
from tiny_transformers import Plain
from torch.nn.functional import cross_entropy, kl_div
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from recipe_utils.cli.registry import recipe_path
from recipe_utils.models.transformers.packing_check import DoublePrecision

# The second update step has one sample: of two ranks, one has dummy microbatches only. All samples begin alike.
COMMON = {**DATA, "num_samples": 17, "num_common": 20}
KEYS = {**STEP_OF_16, "dataset": COMMON, "model": tiny.DEEP_UNTIED_MODEL}
SGD = {"lr": 0.5, "momentum": 0.9}
PACKED = {"microbatching": "packed", "batch_size": 1, "max_tokens_per_microbatch": 64}
PADDED = {"microbatching": "least_padding", "batch_size": 3}
SHARES = {**PACKED, **spanning(2, 24)}  # of rows with odd numbers of tokens, too
LOSSES = {
    "balance": {"loss": {"_component_": "own_objectives.BalancedLoss", "weight": 0.3}},
    "z-loss": {"loss": {"_component_": "z_loss_of_the_page.ZLoss", "weight": 0.02, "tokens_per_chunk": 7}},
    "likeliest": {
        "loss": {"_component_": "own_objectives.LikeliestLoss"},
        "dataset": {**COMMON, "_component_": "own_objectives.likeliest_dataset"},
    },
}
ATTACHED = {
    "balance": 'loss_fn.watch(trained_model(self.model, "counts"), ranks)',
    "noise": "Noise(self.run, self.model.module, alpha=5).attached",
}
CHANGES = {  # of both copies of the recipe; the z-loss needs none
    "import torch\n": "import torch\nfrom own_objectives import Noise\nfrom recipe_utils.models.frozen import trained_model\n",
    "declared=self.declared\n": "declared=self.declared, shares_beginnings=False\n",
}
WRONG = {
    "padding counted as real": (BalancedLoss, "real", lambda self, owners: owners == owners),
    "counts of one rank": (BalancedLoss, "over_ranks", lambda self, counts: counts),
    "noise by row": (Noise, "places", lambda self, targets: range(len(targets.samples))),
}


def balanced(model, samples, step):
    losses, routed = [], []
    for sample in samples:
        labels, tokens = torch.tensor(sample["labels"])[1:], torch.tensor([sample["tokens"]])
        found = model.model(input_ids=tokens, use_cache=False, output_router_logits=True)
        losses.append(cross_entropy(found.logits[0, :-1], labels, reduction="none")[labels != tiny.IGNORE])
        routed.append(found.router_logits)
    of_layers = tuple(torch.cat(each) for each in zip(*routed, strict=True))
    balance = load_balancing_loss_func(of_layers, num_experts=8, top_k=2)
    return {"loss": torch.cat(losses).mean() + 0.3 * balance, "balance": balance.detach()}


def noisy(model, samples, step):
    losses = []
    for place, sample in enumerate(samples):
        shape = len(sample["tokens"]), model.tok_embeddings.embedding_dim
        noise = torch.from_numpy(np.random.default_rng([0, step, place]).uniform(-5, 5, shape)) / np.prod(shape) ** 0.5
        with_noise = model.tok_embeddings.register_forward_hook(lambda *args, noise=noise: args[2] + noise)
        losses.append(cross_entropy(*targets_of(model, sample), reduction="none"))
        with_noise.remove()
    return {"loss": torch.cat(losses).mean()}


def likeliest(model, samples, step):
    losses, num_targets = 0, 0
    for sample in samples:
        logits, labels = targets_of(model, sample)
        is_target = torch.tensor(sample["labels"])[1:] != tiny.IGNORE
        ids, teacher = (torch.from_numpy(column)[1:][is_target] for column in likeliest_tokens(sample).values())
        student = logits.log_softmax(1).take_along_dim(ids, 1)
        losses, num_targets = (
            losses + kl_div(student, teacher, reduction="sum", log_target=True),
            num_targets + len(labels),
        )
    return {"loss": losses / num_targets}


def with_z_loss(model, samples, step):
    logits, labels = map(torch.cat, zip(*[targets_of(model, sample) for sample in samples], strict=True))
    z_loss = 0.02 * logits.logsumexp(1).square().mean()
    return {"loss": cross_entropy(logits, labels) + z_loss, "z_loss": z_loss.detach()}


@cache
def expected_steps(name, folder):
    """Returns metrics and gradients of each update step."""
    objective, is_folder = (
        {"balance": balanced, "noise": noisy, "z-loss": with_z_loss, "likeliest": likeliest}[name],
        name == "balance",
    )
    with tiny.float64_throughout(), DoublePrecision() if is_folder else nullcontext():
        model = Plain(folder / "model" / "qwen3_moe") if is_folder else tiny.tiny_model(KEYS["model"]).double()
        optimizer, found = torch.optim.SGD(model.parameters(), **SGD), []
        for step, samples in enumerate(steps_of(samples_of(COMMON))):
            found.append(metrics_and_gradients(objective, [model], samples, step))
            optimizer.step()
    return found


def run_in(folder, mutant, *args):
    return run_row_in(folder, *args, mutant and (lambda patches: patches.setattr(*WRONG[mutant])))


def train(name, layout, changes, weights_folder, folder, mutant=None):
    """Returns what each rank found."""
    section = section_of(recipe_path(SFT).with_name("writing_a_recipe.md"), "## 8. A z-loss")
    (folder / "z_loss_of_the_page.py").write_text(re.search(r"^```python\n(.*?)^```", section, re.M | re.S)[1])
    world_size, dims = LAYOUTS[layout]
    own = folder_keys(weights_folder, "model", "qwen3_moe") if name == "balance" else {}
    keys = {**KEYS, "optimizer": {"_component_": "tiny.RecordingSGD", **SGD}, **LOSSES.get(name, {}), **own}
    config = writing_to(folder / "out", tiny_config(weights_folder, **keys, **dims, **changes))
    attached = {"models.nothing_attached  # or a pass before the pass": ATTACHED.get(name)}
    recipe = changed_recipe(folder, {**CHANGES, **attached}) if name in ATTACHED else SFT
    return run_distributed(run_in, world_size, str(folder), mutant, config, recipe, name == "balance")


ROWS = [
    ("balance", "one", PACKED, None),
    ("balance", "fsdp-2", PADDED, None),
    *[slow("balance", "one", changes, None) for changes in (PADDED, {**PACKED, **RECOMPUTED})],
    *[slow("balance", "fsdp-2", changes, None) for changes in (PACKED, SHARES)],
    ("balance", "one", PADDED, "padding counted as real"),
    ("balance", "fsdp-2", PACKED, "counts of one rank"),
    ("noise", "fsdp-2", PACKED, None),
    ("noise", "pp-2", PADDED, None),
    *[slow("noise", *at, None) for at in (("one", PACKED), ("one", PADDED), ("fsdp-2", PADDED), ("fsdp-2", SHARES))],
    ("noise", "one", PADDED, "noise by row"),
    ("z-loss", "one", PACKED, None),
    ("z-loss", "fsdp-2", PADDED, None),
    ("likeliest", "one", PACKED, None),
    ("likeliest", "fsdp-2", PADDED, None),
    *[slow("likeliest", *case, None) for case in (("one", PADDED), ("fsdp-2", PACKED), ("fsdp-2", SHARES))],
    *[slow("z-loss", *case, None) for case in (("one", PADDED), ("fsdp-2", PACKED), ("pp-2", PACKED))],
]


@pytest.mark.parametrize(("name", "layout", "changes", "mutant"), ROWS)
def test_it_is_exact_unless_the_recipe_is_wrong(name, layout, changes, mutant, weights_folder, tmp_path):
    ranks = train(name, layout, changes, weights_folder, tmp_path, mutant)
    assert_steps(ranks, expected_steps(name, weights_folder), mutant)
    if changes is SHARES:
        assert set().union(*(sizes for *_, sizes, _ in ranks)) == {1, 2}


@pytest.mark.slow
def test_noise_is_the_same_when_other_ranks_resume(weights_folder, tmp_path):
    train("noise", "one", {**PACKED, "save_every_n_steps": 1}, weights_folder, tmp_path)
    shutil.rmtree(tmp_path / "out" / "step_2")
    ranks = train("noise", "fsdp-2", {**PADDED, "resume_from_checkpoint": True}, weights_folder, tmp_path)
    assert_steps(ranks, expected_steps("noise", weights_folder)[1:])
