"""The benchmark as users start it, with tiny models; what it times here means nothing."""

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import hugging_face_runs
import pytest
import tiny
import yaml
from omegaconf import OmegaConf
from programs import TUNE, Popen
from torchtune import config as torchtune_config

pytestmark = pytest.mark.slow
RECIPE = "benchmark_tokens_per_second"
HAS_HUGGING_FACE = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))
HAS_TRL = HAS_HUGGING_FACE and all(importlib.util.find_spec(name) for name in ("peft", "trl"))

STOCK, LIMIT, TRL = ({"kind": kind} for kind in ("stock", "limit", "trl"))
IN_ORDER = {"kind": "update_step", "microbatching": "in_order"}
PACKED = {"kind": "update_step", "microbatching": "packed"}
BASELINES = {
    "stock": STOCK,
    "in_order": IN_ORDER,
    "packed": PACKED,
    "hf_batch_rebalance": {"kind": "hf_trainer", "train_sampling_strategy": "batch_rebalance"},
    "limit": LIMIT,
    "saving": {"kind": "update_step", "save_every_n_steps": 1},
    "broken": {**IN_ORDER, "max_tokens_per_microbatch": 8},  # refused once the recipe runs
}
OF_ADAPTERS = {
    "stock": STOCK,
    "packed": PACKED,
    "trl_padded": {**TRL, "padding_free": False},
    "trl_padding_free": {**TRL, "padding_free": True},
    "hf_trainer": {"kind": "hf_trainer"},
    "full": {"kind": "update_step", "model": tiny.MODEL},
    "limit": LIMIT,
}
PAIR_BASELINES = {
    "stock": STOCK,
    "in_order": IN_ORDER,
    "packed": {**PACKED, "prefix_sharing": False},
    "shared": PACKED,
    "shared_cached": {**PACKED, "reference": "cached", "precompute_reference": True},
    "trl": TRL,
    "trl_precomputed": {**TRL, "precompute_ref_log_probs": True},
    "limit": LIMIT,
}
PAIRS = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 40, "kind": "alike_beginnings"}
OF_PAIRS = {
    "dataset": PAIRS,
    "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.3},
}
OF_A_TEACHER = {
    "stock": STOCK,
    "in_order": IN_ORDER,
    "packed": PACKED,
    "packed_cached": {**PACKED, "teacher_cache": "hidden"},
    "trl": TRL,
}


def write_configs(folder, of_recipe=None, **changes):
    """Paths of the benchmark's config and its output."""
    recipe_config = {**hugging_face_runs.config(folder), "batch_size": 2, **(of_recipe or {})}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_config))
    benchmark_config = {
        "output_dir": f"{folder}/benchmark",
        "update_step_config": f"{folder}/recipe.yaml",
        "overrides": {"gradient_accumulation_steps": 2},
        "peers": BASELINES,
        "num_update_steps": 2,
        "num_rounds": 1,
        "step_timeout_seconds": 120,
        **changes,
    }
    path = folder / "benchmark.yaml"
    path.write_text(yaml.safe_dump(benchmark_config, sort_keys=False))
    return path, folder / "benchmark"


def started(config_path, *overrides):
    return Popen(
        [TUNE, "run", RECIPE, "--config", str(config_path), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def workers_of(folder):
    """Ids of the peers' processes of the benchmark that writes to this folder: their output goes there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith(f"{folder}/peers/"):
                found.append(int(path.parts[2]))
    return found


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """What was printed, the Markdown and the JSON of one benchmark of all kinds of peers."""
    config_path, folder = write_configs(tmp_path_factory.mktemp("benchmark"))
    process = started(config_path)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert workers_of(folder) == []
    markdown = (folder / "benchmark.md").read_text()
    return printed, markdown, json.loads((folder / "benchmark.json").read_text())


def ran(results):
    return [summary["baseline"] for summary in results["summaries"]]


def test_all_baselines_train_the_same_update_steps_with_the_same_losses(benchmark):
    _, markdown, results = benchmark
    expected = [name for name in BASELINES if name != "broken"]
    if not HAS_HUGGING_FACE:
        expected = [name for name in expected if not name.startswith("hf_")]
    assert ran(results) == expected
    for summary in results["summaries"]:
        assert summary["num_steps"] == 2
        assert summary["has_same_samples"], summary["baseline"]
        assert summary["loss_deviation"] < 1e-4, summary["baseline"]
        assert len(results["losses"][summary["baseline"]][0]) == 3  # with the warm-up step
    assert "Every update step had the same tokens in every baseline." in markdown
    assert all(step["fingerprint"] == step["expected_fingerprint"] for step in results["steps"])


def test_every_baseline_has_its_speed_padding_and_memory_over_the_reference(benchmark):
    printed, markdown, results = benchmark
    assert markdown in printed
    assert "| over stock (quartiles) |" in markdown
    summaries = {summary["baseline"]: summary for summary in results["summaries"]}
    assert summaries["stock"]["ratio"] == [1, 1, 1]
    assert results["matrix_peak_tflops"] > 0
    for summary in summaries.values():
        assert 0 < summary["share_of_peak"] < 1
        assert summary["ratio"][1] > 0
        assert summary["memory_ratio"] > 0
    assert summaries["limit"]["padding_fraction"] == 0
    assert summaries["stock"]["padding_fraction"] > 0.1
    assert summaries["in_order"]["num_steps"] == 2
    assert (
        summaries["in_order"]["positions_per_target"] == summaries["stock"]["positions_per_target"]
    )


def test_a_baseline_that_fails_is_reported_and_the_others_continue(benchmark):
    printed, markdown, results = benchmark
    assert "broken: rank 0 ended with exit code 1; the last lines of" in printed
    assert "max_tokens_per_microbatch=8: microbatching=in_order counts samples" in printed
    assert "| broken | failed, see the log |" in markdown
    assert "broken" in results["missing"]


def test_a_baseline_that_is_to_save_does_and_the_others_do_not(benchmark):
    _, markdown, results = benchmark
    saved = {
        name: sorted(path.name for path in Path(of_baseline["config"]["output_dir"]).glob("step_*"))
        for name, of_baseline in results["baselines"].items()
    }
    assert saved.pop("saving")
    assert not any(saved.values())
    assert "| seconds per update step more than stock (quartiles) |" in markdown


def test_what_ran_is_written_down(benchmark):
    _, _, results = benchmark
    assert results["command"].startswith(f"tune run {RECIPE} --config")
    assert results["versions"]["torchtune"] == "0.6.1"
    assert results["machine"]
    assert all(math.isfinite(step["seconds"]) for step in results["steps"])


# ---- A model with adapters ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark_of_adapters(tmp_path_factory):
    """The JSON of a benchmark of DoRA, on one process."""
    folder = tmp_path_factory.mktemp("benchmark_of_adapters")
    fresh = hugging_face_runs.config(folder)["checkpointer"]
    torchtune_config.instantiate(OmegaConf.create(fresh))  # writes the base
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": fresh["checkpoint_dir"],
        "checkpoint_files": ["model.safetensors"],
        "model_type": "LLAMA3_2",
        "output_dir": f"{folder}/out",
    }
    model = tiny.adapted(tiny.MODEL, use_dora=True)
    config_path, output = write_configs(
        folder, {"model": model, "checkpointer": checkpointer}, peers=OF_ADAPTERS
    )
    process = started(config_path)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return json.loads((output / "benchmark.json").read_text())


def test_all_baselines_train_the_same_adapters_with_the_same_losses(benchmark_of_adapters):
    results = benchmark_of_adapters
    expected = [name for name in OF_ADAPTERS if name != "hf_trainer"]
    if not HAS_TRL:
        expected = [name for name in expected if not name.startswith("trl_")]
    assert ran(results) == expected
    for summary in results["summaries"]:
        assert summary["has_same_samples"], summary["baseline"]
        if summary["baseline"] == "full":
            assert summary["loss_deviation"] is None
        else:
            assert summary["loss_deviation"] < 1e-4, summary["baseline"]
    assert results["missing"]["hf_trainer"].startswith("skipped: ")


# ---- Pairs of answers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark_of_pairs(tmp_path_factory):
    """The JSON of a benchmark of preference tuning, on one process."""
    config_path, output = write_configs(
        tmp_path_factory.mktemp("benchmark_of_pairs"),
        OF_PAIRS,
        peers=PAIR_BASELINES,
        update_step_recipe="full_dpo_update_step",
        num_update_steps=3,
    )
    process = started(config_path)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert "Every update step had the same tokens in every baseline." in printed
    return json.loads((output / "benchmark.json").read_text())


def test_all_baselines_train_the_same_pairs_with_the_same_losses(benchmark_of_pairs):
    results = benchmark_of_pairs
    expected = [name for name in PAIR_BASELINES if HAS_TRL or not name.startswith("trl")]
    assert ran(results) == expected
    for summary in results["summaries"]:
        assert summary["has_same_samples"], summary["baseline"]
        assert summary["loss_deviation"] < 1e-5, summary["baseline"]
    assert all(step["fingerprint"] == step["expected_fingerprint"] for step in results["steps"])
    losses = results["losses"]["stock"][0]
    assert len(losses) == 4
    assert abs(losses[-1] - math.log(2)) > 0.01, "the policy is still the reference"


def test_what_both_sides_begin_with_is_computed_once_where_it_is_shared(benchmark_of_pairs):
    slots = {s["baseline"]: s["positions_per_target"] for s in benchmark_of_pairs["summaries"]}
    assert slots["limit"] == slots["packed"]
    assert slots["shared"] == slots["shared_cached"] < slots["packed"] < slots["in_order"]
    assert slots["in_order"] <= slots["stock"]
    padding = {s["baseline"]: s["padding_fraction"] for s in benchmark_of_pairs["summaries"]}
    assert padding["shared"] == padding["limit"] == 0


# ---- Distillation --------------------------------------------------------------------


def fresh_checkpointer(folder, model, seed):
    return {
        "_component_": "recipe_utils.embedded.fresh_weights.fresh_llama_checkpointer",
        "model": model,
        "checkpoint_dir": f"{folder}/fresh_{seed}",
        "output_dir": f"{folder}/out",
        "seed": seed,
    }


@pytest.fixture(scope="module", params=["whole", "adapters", "divergence_alone"])
def benchmark_of_a_teacher(tmp_path_factory, request):
    """The JSON of a benchmark of distillation, of a whole student or of its adapters."""
    is_adapted = request.param == "adapters"
    folder = tmp_path_factory.mktemp("benchmark_of_a_teacher")
    config_path, output = write_configs(
        folder,
        {
            "model": tiny.adapted(tiny.MODEL) if is_adapted else tiny.MODEL,
            "checkpointer": fresh_checkpointer(folder, tiny.MODEL, seed=0),
            "teacher_model": tiny.TEACHER_MODEL,
            "teacher_checkpointer": fresh_checkpointer(folder, tiny.TEACHER_MODEL, seed=1),
            "kd_ratio": 1.0 if request.param == "divergence_alone" else 0.7,
        },
        peers=OF_A_TEACHER,
        update_step_recipe="knowledge_distillation_update_step",
    )
    process = started(config_path)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert "Every update step had the same tokens in every baseline." in printed
    assert "The loss deviation is that of the first update step" in printed
    return json.loads((output / "benchmark.json").read_text())


def test_all_baselines_learn_from_the_same_teacher_on_the_same_update_steps(benchmark_of_a_teacher):
    results = benchmark_of_a_teacher
    takes_trl = results["baselines"]["packed"]["config"]["kd_ratio"] == 1 and HAS_TRL
    assert ran(results) == [name for name in OF_A_TEACHER if takes_trl or name != "trl"]
    for summary in results["summaries"]:
        assert summary["has_same_samples"], summary["baseline"]
        if summary["baseline"] != "trl":  # its loss is without the teacher's entropy
            assert summary["loss_deviation"] < 1e-5, summary["baseline"]
    assert all(step["fingerprint"] == step["expected_fingerprint"] for step in results["steps"])
    losses = {peer: rounds[0] for peer, rounds in results["losses"].items()}
    assert len(losses["packed"]) == 3  # with the warm-up step
    assert losses["packed"] == pytest.approx(losses["in_order"], rel=1e-5)
    assert losses["packed"] == pytest.approx(losses["packed_cached"], rel=1e-5)


# ---- What can go wrong ----------------------------------------------------------------------------


def test_interrupting_the_benchmark_leaves_no_process(tmp_path):
    config_path, folder = write_configs(tmp_path, peers={"in_order": BASELINES["in_order"]})
    process = started(config_path, "num_update_steps=30")
    deadline = time.monotonic() + 60
    while not workers_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_of(folder)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert workers_of(folder) == []
    assert not (folder / "benchmark.md").exists()


def test_all_that_is_wrong_with_a_config_is_said_at_once(tmp_path):
    peers = {
        "stock": {"kind": "stok"},
        "ours": {"kind": "update_step", "microbatchng": "in_order"},
        "limit": {"kind": "limit"},
    }
    config_path, _ = write_configs(
        tmp_path, peers=peers, baseline="stoc", num_rounds=0, overrides={"optimizer_in_bwd": True}
    )
    process = started(config_path, "num_update_steps=500")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert (
        "peers.stock.kind=stok: set it to one of stock, update_step, hf_trainer, trl, limit"
        in printed
    )
    assert (
        "peers.ours: microbatchng: this recipe has no such key; did you mean microbatching?"
        in printed
    )
    assert (
        "baseline=stoc: no entry of peers has this name; set it to one of stock, ours, limit"
        in printed
    )
    assert "num_rounds=0: it must be at least 1" in printed
    assert "overrides.optimizer_in_bwd=True" in printed
    assert "num_update_steps=500: the dataset has 160 samples" in printed
