"""The benchmark with tiny models, whose times mean nothing. Its workers are forks, which saves their imports;
one test starts them as users do."""

import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import hugging_face_runs
import pytest
import tiny
import yaml
from distributed_runs import fork_context
from omegaconf import OmegaConf
from programs import TUNE, Popen, become_program, tune_run_here
from recipe_runs import changed_recipe
from torchtune import config as torchtune_config

from recipe_utils.benchmark import interleave
from recipe_utils.benchmark.baselines import worker
from recipe_utils.cli.registry import config_path

RECIPE = "benchmark_tokens_per_second"
STOCK, LIMIT = {"kind": "stock"}, {"kind": "limit"}
IN_ORDER = {"kind": "update_step", "microbatching": "in_order"}
PACKED = {"kind": "update_step", "microbatching": "packed"}


def fresh_checkpointer(folder, model, seed=0):
    return {
        "_component_": "recipe_utils.examples.fresh_llama_checkpointer",
        "model": model,
        "checkpoint_dir": f"{folder}/fresh_{seed}",
        "output_dir": f"{folder}/out",
        "seed": seed,
    }


def write_configs(folder, baselines, of_recipe=None, **changes):
    """Returns paths of the benchmark's config and its output."""
    recipe_config = {**hugging_face_runs.config(folder), "batch_size": 2, **(of_recipe or {})}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_config))
    benchmark_config = {
        "output_dir": f"{folder}/benchmark",
        "update_step_config": f"{folder}/recipe.yaml",
        "overrides": {"gradient_accumulation_steps": 2},
        "baselines": baselines,
        "num_update_steps": 1,
        "num_rounds": 1,
        "step_timeout_seconds": 120,
        **changes,
    }
    path = folder / "benchmark.yaml"
    path.write_text(yaml.safe_dump(benchmark_config, sort_keys=False))
    return path, folder / "benchmark"


class ForkedWorker:
    """The worker that ``Popen`` would start, as a fork of the server of `distributed_runs`."""

    def __init__(self, command, env, pass_fds, stdout, **_):
        pipe = Connection(os.dup(pass_fds[0]))
        args = (command[-2], pipe, stdout.name)
        self._process = fork_context.Process(target=work, args=args)
        self._process.start()
        self.pid = self._process.pid
        pipe.close()

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        if timeout is None:
            self._process.kill()  # if it has no process group yet
        self._process.join(timeout)


def work(spec, pipe, output):
    become_program(["worker", spec, str(pipe.fileno())], output)
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]  # as with -P
    worker.main()


def run_here(folder, *args, **changes):
    """Returns the screen, the Markdown and the JSON of a benchmark with forked workers."""
    screen, markdown, results = run_config(*write_configs(folder, *args, **changes))
    for summary in results["summaries"]:
        assert summary["has_same_samples"], summary["baseline"]
    assert "Every update step had the same tokens in every baseline." in screen
    return screen, markdown, results


def run_config(path, output):
    """Returns what :func:`run_here` does, for the path of a config and its output."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interleave, "Popen", ForkedWorker)
        patches.setattr(signal, "signal", lambda *_: None)
        code, screen = tune_run_here(RECIPE, path)
    assert code == 0, screen
    results = json.loads((output / "benchmark.json").read_text())
    assert all(step["fingerprint"] == step["expected_fingerprint"] for step in results["steps"])
    return screen, (output / "benchmark.md").read_text(), results


def by_name(results):
    return {summary["baseline"]: summary for summary in results["summaries"]}


def deviations(results):
    return {name: summary["loss_deviation"] for name, summary in by_name(results).items()}


# ---- Text -----------------------------------------------------------------------------------------

OF_TEXT = {
    "stock": STOCK,
    "in_order": IN_ORDER,
    "packed": PACKED,
    "mine": {**PACKED, "recipe": "my_recipe.py"},  # imports a module beside it
    "hf_batch_rebalance": {"kind": "hf_trainer", "train_sampling_strategy": "batch_rebalance"},
    "limit": LIMIT,
    "broken": {**IN_ORDER, "max_tokens_per_microbatch": 8},  # refused once the recipe runs
}


@pytest.mark.slow
def test_baselines_train_the_same_update_steps_and_have_their_speed_padding_and_memory_over_the_reference(tmp_path):
    changed_recipe(tmp_path, {"\nimport torch\n": "\nimport beside_my_recipe\nimport torch\n"})
    (tmp_path / "beside_my_recipe.py").touch()
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(tmp_path)
        screen, markdown, results = run_here(tmp_path, OF_TEXT)
    assert markdown in screen
    summaries = by_name(results)
    assert list(summaries) == [name for name in OF_TEXT if name != "broken"]
    assert max(deviations(results).values()) < 1e-4
    assert all(len(of_round[0]) == 2 for of_round in results["losses"].values() if of_round[0])
    assert results["command"].startswith(f"tune run {RECIPE} --config")
    assert results["versions"]["torchtune"] == "0.6.1"
    assert results["machine"]

    assert "| over stock (quartiles) |" in markdown
    assert summaries["stock"]["ratio"] == [1, 1, 1]
    for summary in summaries.values():
        assert summary["num_steps"] == 1
        assert 0 < summary["ratio"][1] < math.inf
        assert summary["memory_ratio"] > 0
    assert summaries["limit"]["padding_fraction"] == 0
    assert summaries["stock"]["padding_fraction"] > 0.1
    slots = {name: summary["positions_per_target"] for name, summary in summaries.items()}
    assert slots["in_order"] == slots["stock"]

    assert "broken: rank 0 ended with exit code 1; the last lines of" in screen
    assert "max_tokens_per_microbatch=8: microbatching=in_order counts samples" in screen
    assert "| broken | failed, see the log |" in markdown


# ---- One after the other, without a file -----------------------------------------------------------


SMALL = {
    "model": {
        "vocab_size": 512, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64,
        "intermediate_dim": 128, "max_seq_len": 128,
    },
    "dataset": {"num_samples": 800, "median": 20},
    "device": "cpu",
    "dtype": "fp32",
}  # fmt: skip


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_in_small_on_a_cpu(tmp_path):
    cfg = OmegaConf.merge(
        OmegaConf.load(config_path("llama3_2/1B_gpu_benchmark")),
        {
            "output_dir": str(tmp_path),
            "overrides": SMALL,
            "baselines": {name: {"compile": False} for name in ("stock_compiled", "stock_packed", "packed_compiled")},
            "num_warmup_steps": 1,
            "num_update_steps": 2,
        },
    )
    OmegaConf.save(cfg, tmp_path / "small.yaml")
    screen, markdown, results = run_config(tmp_path / "small.yaml", tmp_path)
    ran = [step["baseline"] for step in results["steps"]]
    assert ran == [name for name in cfg.baselines for _ in range(2)]
    summaries = by_name(results)
    others = ["stock_packed", "trl_packing"]
    assert [name for name in summaries if not summaries[name]["has_same_samples"]] == others
    assert f"Other samples per update step than the reference: {', '.join(others)}; tokens per second" in markdown
    found = deviations(results)
    assert {found.pop(name) for name in others} == {None}
    assert max(found.values()) < 1e-5
    padding = {name: each["padding_fraction"] for name, each in summaries.items()}
    assert padding["packed"] == padding["trl_packing"] == 0 < padding["stock_packed"]
    positions = {name: each["positions_per_target"] for name, each in summaries.items()}
    assert positions["packed"] < positions["stock_packed"] < positions["stock"] == positions["hf_trainer"]
    assert "The baselines ran one after the other" in screen
    peak = results["product_flops_per_second"]
    for name, each in summaries.items():
        rates = [step["num_flops"] / step["seconds"] for step in results["steps"] if step["baseline"] == name]
        assert each["share_of_product"] == pytest.approx(statistics.median(rates) / peak)


# ---- Adapters, pairs, a teacher -------------------------------------------------------------------


@pytest.mark.slow
def test_all_baselines_train_the_same_adapters_with_the_same_losses(tmp_path):
    fresh = fresh_checkpointer(tmp_path, tiny.MODEL)
    torchtune_config.instantiate(OmegaConf.create(fresh))  # writes the base
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": fresh["checkpoint_dir"],
        "checkpoint_files": ["model.safetensors"],
        "model_type": "LLAMA3_2",
        "output_dir": f"{tmp_path}/out",
    }
    baselines = {"stock": STOCK, "packed": PACKED, "full": {**PACKED, "model": tiny.MODEL}, "limit": LIMIT}
    of_recipe = {"model": tiny.adapted(tiny.MODEL, use_dora=True), "checkpointer": checkpointer}
    *_, results = run_here(tmp_path, baselines, of_recipe)
    found = deviations(results)
    assert list(found) == list(baselines)
    assert found.pop("full") is None
    assert max(found.values()) < 1e-4


@pytest.mark.slow
def test_all_baselines_train_the_same_pairs_and_compute_shared_tokens_once(tmp_path):
    pairs = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 40, "kind": "alike_beginnings"}
    loss = {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.3}
    baselines = {
        "stock": STOCK,
        "packed": {**PACKED, "prefix_sharing": False},
        "shared": PACKED,
        "shared_cached": {**PACKED, "reference": "cached"},
    }
    *_, results = run_here(
        tmp_path,
        baselines,
        {"dataset": pairs, "loss": loss},
        update_step_recipe="full_dpo_update_step",
        num_update_steps=2,
    )
    found = deviations(results)
    assert list(found) == list(baselines)
    assert max(found.values()) < 1e-5
    last_loss = results["losses"]["stock"][0][-1]
    assert abs(last_loss - math.log(2)) > 0.005, "the policy is still the reference"
    slots = {name: each["positions_per_target"] for name, each in by_name(results).items()}
    assert slots["shared"] == slots["shared_cached"] < slots["packed"]
    assert slots["packed"] < slots["stock"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kd_ratio"), [(tiny.MODEL, 1.0), (tiny.adapted(tiny.MODEL), 0.7)], ids=["divergence_alone", "adapters"]
)
def test_all_baselines_learn_from_the_same_teacher(model, kd_ratio, tmp_path):
    baselines = {"stock": STOCK, "packed": PACKED}
    of_recipe = {
        "model": model,
        "checkpointer": fresh_checkpointer(tmp_path, tiny.MODEL),
        "teacher_model": tiny.TEACHER_MODEL,
        "kd_ratio": kd_ratio,
    }
    # As in the config of the project, the teacher's model is that of the recipe's config.
    teacher = {**fresh_checkpointer(tmp_path, tiny.TEACHER_MODEL, seed=1), "model": "${teacher_model}"}
    overrides = {"gradient_accumulation_steps": 2, "teacher_checkpointer": teacher}
    how = {"update_step_recipe": "knowledge_distillation_update_step", "overrides": overrides}
    screen, _, results = run_here(tmp_path, baselines, of_recipe, **how)
    assert "The loss deviation is that of the first update step" in screen
    found = deviations(results)
    assert list(found) == list(baselines)
    assert max(found.values()) < 1e-5


# ---- The command ----------------------------------------------------------------------------------


def workers_of(folder):
    """Returns the ids of the workers of the benchmark whose output goes to this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith(f"{folder}/baselines/"):
                found.append(int(path.parts[2]))
    return found


@pytest.mark.slow
def test_interrupting_the_benchmark_after_some_turns_leaves_no_process(tmp_path, started):
    changes = {"num_update_steps": 30, "num_rounds": 9}
    path, folder = write_configs(tmp_path, {"in_order": IN_ORDER}, **changes)
    process = Popen([TUNE, "run", RECIPE, "--config", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started.append(process)
    printed = b""
    while not re.search(rb"\| [1-9][0-9]*/31", printed):  # the progress bar
        printed += (more := process.stdout.read1())
        assert more, printed.decode()
    assert len(workers_of(folder)) == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert workers_of(folder) == []
    assert not (folder / "benchmark.md").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reference": "stoc", "num_rounds": 0}, ["num_rounds=0: it must be at least 1"]),
        ({"reference": "stoc"}, ["reference=stoc: no entry of baselines has this name; set it to one of"]),
        ({"baselines": {}}, ["baselines: there are none"]),
        ({"overrides": {"optimizer_in_bwd": True}}, ["overrides.optimizer_in_bwd=True"]),
        ({"overrides": {"device": "mtia"}}, ["device=mtia: "]),
        (
            {"num_update_steps": 500},
            [
                "baselines.stock: kind=stok: set it to one of stock, update_step, hf_trainer, trl_sft, limit",
                "baselines.ours: microbatchng: this recipe has no such key; did you mean microbatching?",
                "baselines.limit: num_update_steps: the dataset has 160 samples",
            ],
        ),
    ],
)
def test_problems_of_a_config_are_reported(changes, expected, tmp_path):
    baselines = {"stock": {"kind": "stok"}, "ours": {"kind": "update_step", "microbatchng": "in_order"}, "limit": LIMIT}
    path, _ = write_configs(tmp_path, **{"baselines": baselines, **changes})
    code, screen = tune_run_here(RECIPE, path)
    assert code == 2
    for problem in expected:
        assert problem in screen
