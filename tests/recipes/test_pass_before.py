"""Passes before the pass of "Writing a recipe", of the start and of the trained model, are exact in every layout."""

from functools import cache

import pytest
import tiny
import torch
from arrays import LAYOUTS
from big_batch import DATA, STEP_OF_16, metrics_and_gradients, samples_of, steps_of, targets_of
from distributed_runs import run_distributed
from gradient_rows import assert_steps, outputs_of_another_microbatch, run_row, spanning
from recipe_runs import recipe_of_page, tiny_config

from recipe_utils.models.frozen import FrozenModel
from recipe_utils.models.runner import Whole
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.update_steps.step import Microbatch, Targets, UpdateStep

SGD = {"_component_": "tiny.RecordingSGD", "lr": 0.5}  # In the first update step the divergence has no gradient.
HELD_OUT = {**DATA, "num_samples": 5, "seed": 5}
KEYS = {**STEP_OF_16, "dataset_val": HELD_OUT, "run_val_every_n_steps": 1, "model": tiny.DEEP_UNTIED_MODEL}
PACKED = {"microbatching": "packed", "max_tokens_per_microbatch": 64}


def cross_entropy_with_kl(model, start, samples):
    sums = torch.zeros(3)
    for logits, labels, sample in ((*targets_of(model, sample), sample) for sample in samples):
        of_start = targets_of(start, sample)[0].detach()
        picked, before = (x.log_softmax(-1)[range(len(labels)), labels] for x in (logits, of_start))
        kl = (before - picked).exp() - 1 - (before - picked)
        sums = sums + torch.stack([0.1 * kl - picked, kl, torch.ones_like(kl)]).sum(1)
    return {"loss": sums[0] / sums[2], "kl": (sums[1] / sums[2]).detach()}


def focal(model, _, samples):
    logits, labels = map(torch.cat, zip(*[targets_of(model, sample) for sample in samples], strict=True))
    log_probs = logits.log_softmax(-1)[range(len(labels)), labels]
    weights = (1 - log_probs.exp()).square().detach()
    return {"loss": -(weights * log_probs).sum() / weights.sum()}


SECTIONS = {"## 11. A pass before the pass": cross_entropy_with_kl, "## 14. A pass of the trained model": focal}
KL, FOCAL = SECTIONS


@cache
def expected_steps(section):
    """Returns gradients and metrics of each update step, and metrics of the validation after it."""
    found, objective = [], SECTIONS[section]
    with tiny.float64_throughout():
        models = model, _ = [tiny.tiny_model(tiny.DEEP_UNTIED_MODEL).double() for _ in range(2)]
        optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
        for samples in steps_of(samples_of(DATA)):
            metrics, gradients = metrics_and_gradients(objective, models, samples)
            optimizer.step()
            held_out = objective(*models, samples_of(HELD_OUT))
            found.append((gradients, metrics, {f"val_{name}": value.item() for name, value in held_out.items()}))
    return found


def zeros(patches):
    outputs = FrozenModel.outputs
    patches.setattr(FrozenModel, "outputs", lambda *args: {i: 0 * found for i, found in outputs(*args).items()})


@pytest.mark.parametrize(
    ("section", "layout", "changes", "mutate"),
    [
        (KL, "one", PACKED, None),
        (KL, "fsdp-2", {"microbatching": "least_padding"}, None),
        (KL, "fsdp-2", {**PACKED, **spanning(2)}, None),
        (KL, "pp-2", PACKED, None),
        (KL, "one", PACKED, zeros),
        (KL, "one", PACKED, outputs_of_another_microbatch),
        (FOCAL, "fsdp-2", {"microbatching": "least_padding"}, None),
        (FOCAL, "pp-2", PACKED, None),
        (FOCAL, "one", PACKED, outputs_of_another_microbatch),
    ],
)
def test_the_page_s_pass_is_exact_unless_its_outputs_are_wrong(
    section, layout, changes, mutate, weights_folder, tmp_path
):
    world_size, dims = LAYOUTS[layout]
    config = tiny_config(weights_folder, output_dir=str(tmp_path), optimizer=SGD, **KEYS, **dims, **changes)
    recipe = recipe_of_page(tmp_path, section)
    ranks = run_distributed(run_row, world_size, config, recipe, False, mutate)
    steps = expected_steps(section)
    assert_steps(ranks, [(metrics, gradients) for gradients, metrics, _ in steps], mutate)
    of_validation = [metrics for metrics in ranks[0][1] if "val_loss" in metrics][-len(steps) :]
    for (*_, expected), metrics in zip(steps, of_validation, strict=True):
        assert mutate or {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)


class Two(torch.nn.Module):
    def forward(self, *, targets, tokens):
        return {"tokens": tokens, "logs": (tokens.log(), tokens.sqrt())}


def test_outputs_are_nested_as_the_loss_returns_them_and_none_is_infinite():
    microbatch = Microbatch({"tokens": torch.tensor([[1.0, 4.0]])}, Targets(*torch.zeros(2, 1)))
    frozen = FrozenModel(Whole(Two(), torch.device("cpu")), name="two")
    with frozen.attached(UpdateStep(0, [microbatch], {}, 1)) as [attached]:
        assert attached.targets.outputs["two"]["logs"][1].tolist() == [[1.0, 2.0]]
    microbatch.inputs["tokens"][0, 0] = 0
    with pytest.raises(NonfiniteError, match="two: outputs are NaN or infinite"):
        frozen.attached(UpdateStep(0, [microbatch], {}, 1)).__enter__()
