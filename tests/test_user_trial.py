"""Command lines that once went wrong without a word, or died, as a user types them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from recipe_runs import SFT
from recipe_runs import tiny_config as make_tiny_config
from warm_tune import tune

SAVING = ["save_every_n_steps=2", "keep_last_n_checkpoints=null"]
RESUME = "resume_from_checkpoint=True"


@pytest.fixture
def trial(weights_folder, tmp_path):
    """Runs a tiny config with changes on the command line, in a folder of the test's own."""
    given = make_tiny_config(
        weights_folder,
        metric_logger={
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
        output_dir=f"{tmp_path}/out",
        max_steps_per_epoch=6,
    )
    given["checkpointer"]["output_dir"] = "${output_dir}"
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(given))

    def run(*changes, num_ranks=1):
        ranks = ["--nproc_per_node", num_ranks] if num_ranks > 1 else []
        done = tune("run", *ranks, SFT, "--config", "my.yaml", *changes, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    return run


def losses(folder):
    lines = (Path(folder) / "out/logs/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def stopped_after_4(trial, folder, *changes):
    """The losses of a whole run, of which the checkpoints after update step 4 are gone."""
    code, said = trial(*SAVING, *changes)
    assert code == 0, said
    shutil.rmtree(folder / "out/step_6")
    return losses(folder)


def test_a_new_run_goes_on_from_its_own_checkpoints(trial, tmp_path):
    assert trial(*SAVING, "optimizer.lr=1e-3")[0] == 0
    code, said = trial(*SAVING, "optimizer.lr=1e-2", "max_steps_per_epoch=4", "epochs=2")
    assert code == 0
    assert "warning: output_dir=" in said
    assert "it holds checkpoints of an earlier run (step_2, step_4, step_6), which are in" in said
    (of_run,) = re.findall(r"Run (\S+) starts in", said)
    whole = losses(tmp_path)
    shutil.rmtree(tmp_path / "out/step_8")
    shutil.rmtree(tmp_path / "out/step_6")
    code, said = trial("optimizer.lr=1e-2", "max_steps_per_epoch=4", "epochs=2", RESUME)
    assert code == 0
    assert f"step_4: run {of_run}, epoch 2, after update step 4" in said
    assert losses(tmp_path) == whole
    assert len(list(tmp_path.glob("out/before_*/step_*"))) == 3
    assert len(list(tmp_path.glob("out/logs/metrics_before_*.jsonl"))) == 1


def test_a_changed_argument_of_the_optimizer_wins_and_an_unchanged_one_changes_nothing(
    trial, tmp_path
):
    whole = stopped_after_4(trial, tmp_path)
    shutil.copytree(tmp_path / "out", tmp_path / "kept")
    code, said = trial(RESUME)
    assert code == 0, said
    assert losses(tmp_path) == whole
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "kept").rename(tmp_path / "out")
    code, said = trial(RESUME, "optimizer.weight_decay=0.5")
    assert code == 0, said
    assert "optimizer.weight_decay: its default in the checkpoint, 0.5 from now on" in said
    found = losses(tmp_path)
    assert found[:5] == whole[:5]
    assert found[5] != whole[5]


def test_another_model_of_equal_shapes_is_refused(trial, tmp_path):
    stopped_after_4(trial, tmp_path)
    code, said = trial(RESUME, "model.num_heads=8", "model.num_kv_heads=4")
    assert code == 2
    assert "model.num_heads=8: the checkpoint was saved with 4" in said
    assert trial(RESUME, "model.rope_base=10000", "resume_with_other_model=True")[0] == 0


def test_gradients_that_are_not_finite_are_seen_before_the_end(trial, tmp_path):
    code, said = trial("log_every_n_steps=100", "optimizer.lr=1e30")
    assert code == 1
    assert "on_nonfinite=stop" in said.splitlines()[-1]
    assert not (tmp_path / "out/epoch_0").exists()


NOTHING = {
    "masked": ["dataset.num_samples=8", "dataset.num_without_targets=8"],
    "held out": [
        "dataset_val._component_=tiny.tiny_dataset", "dataset_val.num_samples=8",
        "dataset_val.num_without_targets=8", "run_val_every_n_steps=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", NOTHING)
def test_data_without_a_target_are_refused(case, trial, tmp_path):
    code, said = trial(*NOTHING[case])
    assert code == 2
    assert "none of its 8 samples can be trained on" in said.splitlines()[-1]
    assert not (tmp_path / "out/epoch_0").exists()


def test_ranks_that_see_other_samples_are_named(trial, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, tiny\n"
        "def mine(tokenizer, num_samples):\n"
        "    return tiny.tiny_dataset(tokenizer, num_samples, seed=int(os.environ['RANK']))\n"
    )
    code, said = trial("dataset=mine.mine", num_ranks=2)
    assert code == 2
    assert "  - dataset: ranks 1 see other samples than rank 0" in said.splitlines()[-1]


def test_torn_checkpoints_are_no_reason_to_start_anew_and_an_empty_folder_is_if_it_is_said(
    trial, tmp_path
):
    code, said = trial(RESUME)
    assert code == 2
    assert "set resume_from_checkpoint=auto to start where there is none" in said
    code, said = trial("resume_from_checkpoint=auto", *SAVING)
    assert code == 0
    assert "resume_from_checkpoint=auto: there is no checkpoint in" in said
    for marker in tmp_path.glob("out/step_*/complete.json"):
        marker.unlink()
    for resume in (RESUME, "resume_from_checkpoint=auto"):
        code, said = trial(resume)
        assert code == 2
        assert "none of the checkpoints in" in said.splitlines()[-1]


def test_seed_is_not_the_order_of_samples_and_data_seed_is(trial, tmp_path):
    found = {}
    for change in ("seed=0", "seed=1", "data_seed=1"):
        assert trial(change)[0] == 0
        found[change] = losses(tmp_path)
    assert found["seed=1"] == found["seed=0"] != found["data_seed=1"]


def test_a_full_disk_of_the_logger_ends_no_training(trial, tmp_path):
    code, said = trial("metric_logger=recipe_runs.FailingLogger", "~metric_logger.log_dir")
    assert code == 0, said
    assert said.count("warning: metric_logger: [Errno 28] No space left on device") == 1
    assert len(losses(tmp_path)) == 6


def test_packed_rows_take_what_datasets_map_leaves_behind(trial, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import tiny\n"
        "def mine(tokenizer, num_samples):\n"
        "    return tiny.Samples([{**s, 'id': 3} for s in tiny.make_samples(num_samples)])\n"
    )
    assert trial("microbatching=packed")[0] == 0
    plain = losses(tmp_path)
    code, said = trial("microbatching=packed", "dataset=mine.mine", num_ranks=1)
    assert code == 0, said
    assert (
        said.count("warning: microbatching=packed: rows contain only text; id of samples is") == 1
    )
    assert losses(tmp_path) == plain


def test_odd_samples_are_skipped_on_two_ranks(trial, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import tiny\n"
        "ODD = [None, {'tokens': ['a'], 'labels': ['a']}, {'tokens': [2**70], 'labels': [1]}]\n"
        "def mine(tokenizer, num_samples):\n"
        "    return tiny.Samples([*tiny.make_samples(num_samples - 3), *ODD])\n"
    )
    changes = ["dataset=mine.mine", "gradient_accumulation_steps=8", "batch_size=2"]
    code, said = trial(*changes, "on_bad_sample=skip", num_ranks=2)
    assert code == 0, said
    for index in (29, 30, 31):
        assert f"warning: sample {index} of dataset: it" in said
    code, said = trial(*changes, num_ranks=2)
    assert code == 1
    assert re.match(r"error: sample (29|30|31) of dataset: it", said.splitlines()[-1])
