"""Compiled layers have the losses of eager ones, and are compiled for rows of any length at once."""

import pytest
import tiny
import torch
from arrays import PP_2
from distributed_runs import run_distributed
from recipe_runs import DPO, KD, SFT, ListLogger, losses, run_recipe, set_up, slow
from tiny_transformers import save_tiny
from torch._dynamo.utils import counters

PACKED = {
    "dtype": "fp64",
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
    "microbatching": "packed",
    "max_tokens_per_microbatch": 64,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_steps_per_epoch": 9,
}
VALIDATED = {"dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 9}, "run_val_every_n_steps": 2}
RECOMPUTED = {"enable_activation_checkpointing": True}
# Sizes that are equal in the first row must not be taken for the same in all.
FIRST = {"tokens": [*range(1, 33)], "labels": [*range(1, 33)]}
AS_LONG_AS_WIDE = {
    "dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 16, "replace": {0: FIRST}},
    "shuffle": False,
}
CASES = {
    "fine-tuning": (1, SFT, {**VALIDATED, **RECOMPUTED}),
    "first row as long as the model is wide": (1, SFT, AS_LONG_AS_WIDE),
    "lora": (1, SFT, {"model": tiny.adapted(tiny.MODEL), "ac_mode": "selective", "ac_option": 2}),
    "pairs": (1, DPO, {}),
    "dummy rows of pairs": (2, DPO, {"dataset": {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 7}}),
    "trees": (1, SFT, {"dataset": {"_component_": "tiny.tiny_tree_dataset", "num_samples": 32}}),
    "teacher": (1, KD, {}),
    "qwen3": (1, SFT, VALIDATED),
    "gemma3_text": (1, SFT, RECOMPUTED),
    "lfm2": (1, SFT, {}),
    "stages": (2, SFT, PP_2),
}


def run_counting_compilations(config, recipe):
    """Returns losses, and the number of compiled graphs after each update step."""
    torch.compiler.reset()
    counters.clear()
    num_graphs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # inductor takes a minute
        with set_up({**config, "compile": True}, recipe) as made:
            update = made.update

            def update_and_count(*args):
                metrics = update(*args)
                num_graphs.append(counters["stats"]["unique_graphs"])
                return metrics

            made.update = update_and_count
            made.train()
    return losses(ListLogger.logged), num_graphs


@pytest.mark.parametrize("name", [slow(name) for name in CASES])
def test_nothing_is_compiled_after_the_first_rows(name, tiny_config, tiny_dpo_config, tiny_kd_config, tmp_path):
    world_size, recipe, changes = CASES[name]
    if name in ("qwen3", "gemma3_text", "lfm2"):
        changes = {**save_tiny(tmp_path / "model", name), **changes}
    config = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}[recipe](**{**PACKED, **changes})
    expected = losses(run_distributed(run_recipe, world_size, config, recipe)[0])
    found = run_distributed(run_counting_compilations, world_size, config, recipe, timeout_seconds=400)
    assert found[0][0] == pytest.approx(expected, rel=1e-6)
    for _, num_graphs in found:
        assert len(num_graphs) > 3
        assert num_graphs[0] > 0
        assert len(set(num_graphs)) == 1
