"""A training in rounds reads each file when it is complete, stops while it waits, and resumes within a round bitwise."""

import json
import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
from distributed_runs import run_distributed
from recipe_runs import (
    ListLogger,
    call_in_step,
    exported_model,
    keep_messages,
    losses,
    refusal,
    run_recipe,
    set_up,
    slow,
    writing_to,
)

from recipe_utils.settings.problems import ConfigError

RL = "full_policy_update_step"
ROUNDS = {"_component_": "recipe_utils.policy.rollout_dataset"}
SAMPLER = {"_component_": "recipe_utils.policy.ModelSampler", "reward": "rewards.of_length", "max_new_tokens": 8}
NUM_GROUPS, NUM_ROUNDS = 6, 3
FEW = {
    "batch_size": ...,
    "gradient_accumulation_steps": ...,
    "global_batch_size": 3,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.02},
}


def file_in(folder, number):
    return Path(folder, f"round_{number:04d}.jsonl")


@pytest.fixture(scope="module")
def module_rounds(module_config, tmp_path_factory):
    """Makes configs of three rounds of two update steps each, whose files are in a folder."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": prompt, "target": 3} for prompt in ("Why?", "How many of them?", "x", "Where", "When")]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def make(folder, samples=False, **changes):
        own = {
            "dataset": {**ROUNDS, "path": str(folder / "rounds"), "groups_per_round": NUM_GROUPS},
            "loss": {"_component_": "recipe_utils.policy.PolicyLoss"},
        }
        sampler = {"sampler": {**SAMPLER, "prompts": str(prompts)}} if samples else {}
        packed = {"microbatching": "packed", "max_tokens_per_microbatch": 64, "epochs": NUM_ROUNDS, "dtype": "fp64"}
        return writing_to(folder / "out", module_config(**{**packed, **FEW, **own, **sampler, **changes}))

    make.prompts = str(prompts)
    return make


@pytest.fixture(scope="module")
def whole(module_rounds, tmp_path_factory):
    """Returns the folder of a training that sampled three rounds, its losses, and its last weights."""
    folder = tmp_path_factory.mktemp("whole")
    config = module_rounds(folder, samples=True)
    logged = run_recipe(config, RL)
    rewards = [line["mean_reward"] for line in logged if "mean_reward" in line]
    assert sum(rewards[-2:]) > sum(rewards[:2]), "it learns nothing"
    return folder, losses(logged), torch.load(exported_model(config), weights_only=True)


def assert_same_end(config, logged, whole, num_before=0):
    _, expected, weights = whole
    assert losses(logged) == expected[num_before:]
    found = torch.load(exported_model(config), weights_only=True)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


# ---- Waiting -------------------------------------------------------------------------------------


@contextmanager
def coming(source, file):
    """Puts a file there once training waits for it."""

    def complete():
        while not any("Waits for" in message for message in messages):
            time.sleep(0.01)
        time.sleep(0.5)
        file.parent.mkdir(exist_ok=True)
        shutil.copy(source, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").rename(file)

    with keep_messages() as messages:
        engine = threading.Thread(target=complete, daemon=True)
        engine.start()
        yield
        engine.join()
    assert sum("Waits for" in message for message in messages) == 1


def test_files_that_come_one_after_the_other_train_as_the_sampled_ones(module_rounds, whole, tmp_path):
    """The second file is written while training waits for it, under another name, which is not read."""
    config, rounds = module_rounds(tmp_path), tmp_path / "rounds"
    shutil.copytree(whole[0] / "rounds", rounds, ignore=lambda *_: ["round_0002.jsonl"])
    (rounds / "round_0002.jsonl.tmp").write_text(file_in(rounds, 1).read_text()[:100])

    with coming(file_in(whole[0] / "rounds", 2), file_in(rounds, 2)):
        logged = run_recipe(config, RL)
    assert_same_end(config, logged, whole)


def with_reference(row):
    """Returns a row with log-probabilities of a reference, which no model of the test has."""
    return {**row, "ref_logprobs": [[x - 0.3 * (i % 3) for i, x in enumerate(each)] for each in row["logprobs"]]}


def without_logprobs(row):
    return {key: value for key, value in row.items() if key != "logprobs"}


@pytest.mark.parametrize(
    ("change", "dataset", "loss"),
    [
        (with_reference, {}, {"kl_weight": 0.1}),
        (with_reference, {"advantage": "teacher"}, {"kind": "reinforce"}),
        (without_logprobs, {}, {}),
    ],
)
def test_what_a_file_has_counts_also_if_it_comes_after_the_start(change, dataset, loss, module_rounds, whole, tmp_path):
    """The second training begins with an empty folder, stops within the first round, and resumes: equal in each bit."""
    found = []
    for name in ("there", "late"):
        config, rounds = module_rounds(tmp_path / name, epochs=2), tmp_path / name / "rounds"
        config["dataset"] |= dataset
        config["loss"] |= loss
        for number in (1, 2):
            rows = map(json.loads, file_in(whole[0] / "rounds", number).read_text().splitlines())
            file = file_in(rounds if name == "there" else tmp_path / name, number)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{json.dumps(change(row))}\n" for row in rows))
        logged = []
        if name == "late":
            with coming(file, file_in(rounds, 1)), set_up(config, RL) as made:
                shutil.copy(file_in(tmp_path / name, 1), file_in(rounds, 1))
                call_in_step(made, 1, made.run.stop.set)
                made.train()
            logged = list(ListLogger.logged)
            shutil.copy(file, file_in(rounds, 2))
            config["resume_from_checkpoint"] = True
        logged += run_recipe(config, RL)
        found.append([(line["loss"], line["grad_norm"], line["ratio"]) for line in logged if "loss" in line])
    assert found[0] == found[1]
    assert len(found[0]) == 4
    assert min(norm for _, norm, _ in found[0]) > 0.1


def stop_while_waiting(config, stops_at_rank):
    """Trains; one rank gets SIGTERM once the training waits. Returns losses and messages."""
    with keep_messages() as messages, set_up(config, RL) as made:

        def stop():
            while not any(Path(config["output_dir"]).glob("epoch_0")):
                time.sleep(0.01)
            time.sleep(1)  # longer than an export takes; before the wait it would end the same
            os.kill(os.getpid(), signal.SIGTERM)

        if made.ranks.dp_rank == stops_at_rank:
            threading.Thread(target=stop, daemon=True).start()
        made.train()
    return losses(list(ListLogger.logged)), messages


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_a_stop_while_waiting_ends_all_ranks_and_resumes_there(world_size, module_rounds, whole, tmp_path):
    config, rounds = module_rounds(tmp_path), tmp_path / "rounds"
    shutil.copytree(whole[0] / "rounds", rounds, ignore=lambda *_: ["round_0002.jsonl"])
    (logged, messages), *_ = run_distributed(stop_while_waiting, world_size, config, world_size - 1)
    assert logged == pytest.approx(whole[1][:2], rel=1e-5)
    advice = "the same command with resume_from_checkpoint=True continues from step_2"
    assert any(f"Stopped as requested before round 2; {advice}" in message for message in messages)
    assert not any("Sample from it" in message for message in messages)
    shutil.copy(file_in(whole[0] / "rounds", 2), file_in(rounds, 2))
    resumed = {**config, "resume_from_checkpoint": True}
    logged = run_distributed(run_recipe, world_size, resumed, RL)[0]
    if world_size == 1:
        assert_same_end(config, logged, whole, num_before=2)
    assert losses(logged) == pytest.approx(whole[1][2:], rel=1e-3)


def test_a_teacher_that_is_the_student_is_refused_once_the_first_round_is_there(module_rounds, whole, tmp_path):
    config = module_rounds(tmp_path)
    config["dataset"]["advantage"] = "teacher"
    file = file_in(tmp_path / "rounds", 1)
    with coming(file_in(whole[0] / "rounds", 1), file):
        assert "dataset.advantage=teacher: the teacher is the model that training starts from" in refusal(config, RL)


def test_a_stop_while_waiting_for_the_first_round_ends_before_it(module_rounds, tmp_path):
    def stop():
        while not any("Waits for" in message for message in messages):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    with keep_messages() as messages:
        threading.Thread(target=stop, daemon=True).start()
        with set_up(module_rounds(tmp_path), RL) as made:
            made.train()
    assert any("Stopped as requested before round 1; nothing was trained yet" in message for message in messages)


def test_a_stop_while_it_samples_leaves_no_file(module_rounds, tmp_path):
    config = module_rounds(tmp_path, samples=True)
    config["sampler"]["batch_size"] = 1
    with keep_messages() as messages, set_up(config, RL) as made, pytest.MonkeyPatch.context() as patch:
        call = made.model.module.forward
        patch.setattr(made.model.module, "forward", lambda *args, **keys: (made.run.stop.set(), call(*args, **keys))[1])
        made.train()
    assert not file_in(tmp_path / "rounds", 1).exists()
    assert any("Stopped as requested before round 1; nothing was trained yet" in message for message in messages)


def test_ranks_sample_the_file_of_one_process(module_rounds, whole, tmp_path):
    config = module_rounds(tmp_path, samples=True)
    logged = run_distributed(run_recipe, 2, config, RL)[0]
    assert losses(logged) == pytest.approx(whole[1], rel=1e-3, abs=1e-5)
    for number in range(1, NUM_ROUNDS + 1):
        files = [file_in(folder / "rounds", number).read_text().splitlines() for folder in (tmp_path, whole[0])]
        for found, expected in zip(*(map(json.loads, lines) for lines in files), strict=True):
            log_probs = [[*chain(*row.pop("logprobs"))] for row in (found, expected)]
            assert log_probs[0] == pytest.approx(log_probs[1], abs=1e-4)
            assert found == expected


# ---- Resuming within a round ---------------------------------------------------------------------


@pytest.fixture
def stopped(module_rounds, tmp_path):
    """Returns the config of a training that was stopped after the first update step of its second round."""
    config = module_rounds(tmp_path, samples=True)
    with set_up(config, RL) as made:
        call_in_step(made, 3, made.run.stop.set)
        made.train()
    return {**config, "resume_from_checkpoint": True}


def test_a_resume_within_a_round_reads_its_file_and_is_bitwise(stopped, whole, tmp_path):
    second = file_in(tmp_path / "rounds", 2).stat().st_mtime_ns
    logged = run_recipe(stopped, RL)
    assert file_in(tmp_path / "rounds", 2).stat().st_mtime_ns == second
    assert_same_end(stopped, logged, whole, num_before=3)


def test_a_resume_within_a_round_refuses_another_content_of_its_file(stopped, whole, tmp_path):
    second = file_in(tmp_path / "rounds", 2)
    shutil.copy(file_in(tmp_path / "rounds", 1), second)
    with pytest.raises(ConfigError, match=r"round_0002.jsonl has another content than when the checkpoint was saved"):
        run_recipe(stopped, RL)
    second.unlink()
    with pytest.raises(ConfigError, match=r"round_0002.jsonl has not come within 0 seconds"):
        run_recipe(stopped, RL)
    shutil.copy(file_in(tmp_path / "rounds", 1), second)
    other = {**stopped, "dataset": {**stopped["dataset"], "fields": ["logprobs"]}}
    with pytest.raises(
        ConfigError, match=r"fields=\['logprobs'\]: the checkpoint was saved with \['logprobs', 'reward'\]"
    ):
        run_recipe(other, RL)
    assert len(losses(run_recipe({**stopped, "resume_with_other_data": True}, RL))) == 3


def test_a_file_of_another_training_is_kept_and_not_trained_on(module_rounds, whole, tmp_path):
    config = module_rounds(tmp_path, samples=True, max_steps_per_epoch=1, epochs=1)
    shutil.copytree(whole[0] / "rounds", tmp_path / "rounds")
    first, other = (file_in(tmp_path / "rounds", number) for number in (1, 2))
    content = first.read_text()
    shutil.copy(other, first)
    with keep_messages() as messages:
        assert losses(run_recipe(config, RL)) == whole[1][:1]
    assert first.read_text() == content
    assert (tmp_path / "rounds" / "round_0001.jsonl.before").read_text() == other.read_text()
    assert any("round_0001.jsonl is of another training" in message for message in messages)


# ---- Validation, and what is refused -------------------------------------------------------------


def test_the_mean_reward_of_other_draws_is_a_validation(module_rounds, tmp_path):
    val = {**SAMPLER, "prompts": module_rounds.prompts, "seed": 5}
    plain, validated = (module_rounds(tmp_path / name, samples=True, epochs=1) for name in ("plain", "validated"))
    logged = run_recipe({**validated, "sampler_val": val, "run_val_every_n_steps": 1}, RL)
    rewards = [line["val_reward"] for line in logged if "val_reward" in line]
    assert [line["step"] for line in logged if "val_reward" in line] == [0, 1, 2]
    assert len({*rewards}) > 1
    assert losses(logged) == losses(run_recipe(plain, RL))
    wrong = {**val, "reward": "rewards.raising"}
    with pytest.raises(ConfigError, match=r"sampler_val.reward=rewards.raising: KeyError"):
        run_recipe({**validated, "sampler_val": wrong, "run_val_every_n_steps": 1}, RL)


def with_each(change):
    """Returns a function of lines that changes their rows."""
    return lambda lines: [json.dumps(change(json.loads(line))) for line in lines]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: [*lines, lines[-1][:-30]], "line 7 of .*round_0002.jsonl: it is not one JSON object per line"),
        (lambda lines: lines[:5], "dataset.groups_per_round=6: .*round_0002.jsonl has 5 groups; write as many"),
        (
            with_each(without_logprobs),
            "it has no logprobs; write them, because all rows of the training have logprobs, r",
        ),
        (with_each(with_reference), "dataset.path=.*round_0002.jsonl: it has ref_logprobs; leave them out"),
        (lambda _: None, "wait_seconds=0.3: .*round_0002.jsonl has not come within 0.3 seconds; write it, or wait"),
    ],
)
def test_a_file_that_does_not_fit_or_come_is_named(change, problem, module_rounds, whole, tmp_path):
    shutil.copytree(whole[0] / "rounds", tmp_path / "rounds")
    second = file_in(tmp_path / "rounds", 2)
    lines = change(second.read_text().splitlines())
    second.unlink()
    if lines is not None:
        second.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=problem):
        run_recipe(module_rounds(tmp_path, wait_seconds=0.3), RL)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pipeline_parallel_dim": 2}, "sampler: pipeline_parallel_dim=2 cannot generate"),
        ({"dataset": {"groups_per_round": ...}}, "it has no effect without dataset.groups_per_round; set that, or rem"),
        ({"dataset": {"groups_per_round": -1}}, "groups_per_round=-1: set it to 1 or more"),
        ({"dataset": {"fields": ["logprob"]}}, "dataset.fields=['logprob']: logprob is none of logprobs, ref_logprobs"),
        ({"sampler": {"temperature": 0.0}}, "temperature=0.0: set it to a number above 0"),
        ({"dataset": {"advantage": "given"}}, "dataset.advantage=given: a sampler writes rewards and no advantages"),
        ({"sampler": {"group_size": 1}}, "sampler.group_size=1: one answer has nothing to compare it with"),
        ({"sampler": {"rewards": "x"}}, "sampler.rewards: ModelSampler has no such argument; did you mean reward?"),
        ({"sampler_val": {**SAMPLER, "prompts": "x"}}, "it has no effect with run_val_every_n_steps=null; set"),
        ({"dataset_val": {**ROUNDS, "path": "x", "groups_per_round": 2}}, "dataset_val.groups_per_round: a validation"),
        ({"run_val_every_n_steps": 1}, "run_val_every_n_steps=1: set dataset_val, too"),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(changes, problem, module_rounds, tmp_path):
    config = module_rounds(tmp_path, samples=True)
    for key, value in changes.items():
        changed = {**config[key], **value} if isinstance(value, dict) and key in config else value
        config[key] = {k: v for k, v in changed.items() if v is not ...} if isinstance(changed, dict) else changed
    assert problem in refusal(config, RL)


def test_rounds_in_a_list_of_datasets_are_refused(module_rounds, tmp_path):
    config = module_rounds(tmp_path)
    assert "no round has begun" in refusal({**config, "dataset": [config["dataset"]] * 2}, RL)
