"""What `tune run` shows: little, by its level, and where something is wrong the reason, once and last."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
import tiny
import yaml
from recipe_runs import KD, SFT, tiny_kd_config
from recipe_runs import tiny_config as make_tiny_config
from warm_tune import TUNE, Popen, cold_tune, tune

DISK_LOGGER = {
    "_component_": "torchtune.training.metric_logging.DiskLogger",
    "log_dir": "${output_dir}/logs",
}


@pytest.fixture
def config(weights_folder, tmp_path):
    """Writes a tiny config and returns what runs it, with an output folder of the test's own."""

    def write(name="my.yaml", make=make_tiny_config, **changes):
        given = make(weights_folder, metric_logger=DISK_LOGGER, **changes)
        given["output_dir"] = given["checkpointer"]["output_dir"] = str(tmp_path / "out")
        (tmp_path / name).write_text(yaml.safe_dump(given))
        return name

    return write


def run(folder, *arguments, num_ranks=1, recipe=SFT, env=None):
    ranks = ["--nproc_per_node", num_ranks] if num_ranks > 1 else []
    done = tune("run", *ranks, recipe, "--config", *arguments, cwd=folder, env=env)
    return done.returncode, done.stdout + done.stderr


def last_words(said):
    """The end of what is on the screen, as lines without the bar's."""
    return [line for line in said.replace("\r", "\n").splitlines() if line.strip()]


# ---- A training that goes well ---------------------------------------------------------------------

VAL = {
    "dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 8},
    "run_val_every_n_steps": 2,
}


@pytest.fixture(scope="module")
def whole(weights_folder, tmp_path_factory):
    """A folder, and what two ranks showed of three epochs."""
    folder = tmp_path_factory.mktemp("whole")
    given = make_tiny_config(
        weights_folder, metric_logger=DISK_LOGGER, **VAL, epochs=3, keep_best_checkpoint=True,
        sample_prompts=["Why?"], sample_every_n_steps=5, max_tokens_per_microbatch=32,
        microbatching="packed",
    )  # fmt: skip
    given["output_dir"] = given["checkpointer"]["output_dir"] = str(folder / "out")
    (folder / "my.yaml").write_text(yaml.safe_dump(given))
    code, said = run(folder, "my.yaml", num_ranks=2)
    assert code == 0, said
    return folder, said


def test_the_config_is_shown_once_and_nothing_that_helps_nobody(whole):
    _, said = whole
    assert said.count("with resolved config") == 1
    for noise in ("export.tmp", "Profiling disabled", "successfully", "torchao", "Saving final"):
        assert noise not in said


def test_messages_have_lines_of_their_own_and_warnings_say_so(whole):
    _, said = whole
    lines = said.splitlines()
    assert any(line.startswith("warning: max_tokens_per_microbatch=32: ") for line in lines)
    for start in ("Exported to ", "update step 5 | Why? -> ", "Update step: "):
        assert any(re.split("\r", line)[-1].startswith(start) for line in lines), start


def test_the_bar_is_of_the_update_step_that_is_done(whole):
    folder, said = whole
    metrics = {
        line["step"]: line
        for line in map(json.loads, (folder / "out/logs/metrics.jsonl").read_text().splitlines())
    }
    pattern = (
        r"epoch (\d) of 3 \| loss (\d\.\d{3}) \| lr 1\.0e-2 \| [\d.]+k? tok/s"
        r"(?: \| val (\d\.\d\d))? +\d+%\|.*?\| (\d)/4 "
    )
    shown = re.findall(pattern, said)
    assert len(shown) > 3
    val_loss = None
    for epoch, loss, val, done in shown:
        of_step = metrics[4 * (int(epoch) - 1) + int(done)]
        assert loss == f"{of_step['loss']:.3f}"
        validated = [
            m["val_loss"] for s, m in metrics.items() if "val_loss" in m and s <= of_step["step"]
        ]
        val_loss = f"{validated[-1]:.2f}" if validated else ""
        assert val == val_loss


def test_the_end_says_what_was_done_and_where_the_model_is(whole):
    folder, said = whole
    done, val, model, ask = last_words(said)[-4:]
    metrics = [json.loads(x) for x in (folder / "out/logs/metrics.jsonl").read_text().splitlines()]
    num_tokens = sum(line["num_tokens"] for line in metrics)
    assert re.fullmatch(
        rf"12 update steps, {num_tokens:,} target tokens in .* s: [\d,]+ tokens/s", done
    )
    losses = [line["val_loss"] for line in metrics if "val_loss" in line]
    best = next(line["step"] for line in metrics if line.get("val_loss") == min(losses))
    assert val == (
        f"val_loss: first {losses[0]:.3f}, last {losses[-1]:.3f}, best {min(losses):.3f} "
        f"(update step {best})"
    )
    assert model == f"Model: {folder}/out/epoch_2"
    assert (
        ask == f"Ask it: tune run generate --config {folder}/out/generation.yaml prompt.user='...'"
    )


def test_the_command_at_the_end_loads_the_model(whole):
    folder, _ = whole
    generation = yaml.safe_load((folder / "out/generation.yaml").read_text())
    assert generation["checkpointer"]["checkpoint_dir"] == f"{folder}/out/epoch_2"
    assert generation["model"] == tiny.MODEL
    # The tiny tokenizer has no stop tokens, which torchtune's recipe asks for.
    code, said = run(
        folder, f"{folder}/out/generation.yaml", "tokenizer=tiny.answering_tokenizer",
        "max_new_tokens=4", recipe="generate",
    )  # fmt: skip
    assert code == 0, said
    assert "tokens/sec" in said


def test_the_bar_can_be_switched_off(config, tmp_path, monkeypatch):
    """Cold: tqdm looks at the environment when it is imported. So does torchao, at the version of PyTorch."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    done = cold_tune("run", SFT, "--config", config(max_steps_per_epoch=2), cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "%|" not in said
    assert "torchao" not in said
    assert "2 update steps, " in said


# ---- What the user can mend ------------------------------------------------------------------------

BAD = {"_component_": "tiny.tiny_dataset", "num_samples": 32, "replace": {"9": {"tokens": [1, 900], "labels": [1, 1]}}}  # fmt: skip
DEADLY = {"_component_": "tiny.killing_dataset", "num_samples": 32, "index": 9, "folder": None}
NONFINITE = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e30}}
MENDABLE = {
    "a sample": ({"dataset": BAD, "shuffle": False}, 1, "error: sample 9 of dataset: token 900 is outside"),
    "a sample of a worker": (
        {"dataset": BAD, "shuffle": False, "num_workers": 1}, 1, "error: sample 9 of dataset: token 900 is outside",
    ),
    "a worker": ({"dataset": DEADLY, "shuffle": False, "num_workers": 1}, 1, "error: num_workers=1: a DataLoader worker"),
    "a gradient": (NONFINITE, 1, "error: "),
    "a key": ({"batchsize": 3}, 2, "  - batchsize: this recipe has no such key; did you mean batch_size?"),
    "data": ({"dataset": {**BAD, "replace": {}, "num_without_targets": 32}}, 2, "  - dataset: none of its"),
    "a checkpoint": ({"resume_from_checkpoint": True}, 2, "  - resume_from_checkpoint=True: there is no checkpoint in"),
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("case", MENDABLE)
def test_what_can_be_mended_is_said_once_and_last(case, num_ranks, config, tmp_path):
    changes, code, text = MENDABLE[case]
    found, said = run(tmp_path, config(**changes), num_ranks=num_ranks)
    assert found == code, said
    assert "Traceback" not in said
    assert "elastic" not in said
    *_, last = last_words(said)
    assert last.startswith(text)
    if case == "a gradient":
        assert "on_nonfinite=stop" in last
    assert said.count(last) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_where_a_dataset_of_the_user_s_own_failed_comes_before_the_reason(
    num_workers, config, tmp_path
):
    (tmp_path / "mine.py").write_text(
        "import tiny\n"
        "class Mine(tiny.Samples):\n"
        "    def __getitem__(self, index):\n"
        "        return self.samples[{5: 'five'}.get(index, index)]\n"
        "def mine(tokenizer):\n"
        "    return Mine(tiny.make_samples(8))\n"
    )
    name = config(shuffle=False, dataset={"_component_": "mine.mine"})
    code, said = run(tmp_path, name, f"num_workers={num_workers}", num_ranks=2)
    assert code == 1
    *before, last = last_words(said)
    assert last == (
        "error: sample 5 of dataset: TypeError: list indices must be integers or slices, not str"
    )
    assert "mine.py" in " ".join(before)
    assert said.count("Traceback") == 1


def test_a_bug_keeps_its_traceback(config, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torchtune.data import padded_collate_sft\n"
        "def collate(samples, padding_idx, ignore_idx):\n"
        "    raise ArithmeticError('planted')\n"
    )
    code, said = run(tmp_path, config(collate_fn="mine.collate"))
    assert code == 1
    assert last_words(said)[-1].endswith("ArithmeticError: planted")
    assert "Traceback" in said


COMMAND_LINES = {
    "~lr_scheduler": (0, None),
    "lr_scheduler=null": (0, None),
    "~metric_logger": (0, None),
    "~model.rope_base": (0, None),
    "~seed": (0, None),
    "~lr_schedule": (2, "  - ~lr_schedule: the config has no such key to take out"),
    "~model.rope_bas": (2, "  - ~model.rope_bas: the config has no such key to take out"),
    "epochs": (2, "  - command line or YAML: Command-line overrides must be in the form of key=value"),
}  # fmt: skip


@pytest.mark.parametrize("argument", COMMAND_LINES)
def test_components_can_be_taken_out_on_the_command_line(argument, config, tmp_path):
    code, text = COMMAND_LINES[argument]
    schedule = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    name = config(
        lr_scheduler={"_component_": schedule, "num_warmup_steps": 2}, max_steps_per_epoch=2,
        model={**tiny.MODEL, "rope_base": 10_000},
    )  # fmt: skip
    found, said = run(tmp_path, name, argument)
    assert found == code, said
    if text is not None:
        assert last_words(said)[-1].startswith(text)
        assert "Traceback" not in said
        return
    saved = (
        yaml.safe_load((tmp_path / "out/torchtune_config.yaml").read_text())
        if (argument != "~metric_logger")
        else {}
    )
    key = argument.strip("~").split("=")[0].split(".")[0]
    assert saved.get(key) in (None, tiny.MODEL)


# ---- Two runs, one folder --------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_second_run_in_a_folder_is_refused_by_the_name_of_the_first(num_ranks, config, tmp_path):
    name = config(max_steps_per_epoch=2000, epochs=1000, save_every_n_minutes=60)
    first = Popen([TUNE, "run", SFT, "--config", name], cwd=tmp_path, stdout=-3, stderr=-3)
    lock = tmp_path / "out/.run.lock"
    try:
        while not lock.exists() or not lock.read_text():
            assert first.poll() is None
            time.sleep(0.05)
        code, said = run(tmp_path, name, num_ranks=num_ranks)
        assert code == 2
        last = last_words(said)[-1]
        assert last.startswith(
            f"  - output_dir={tmp_path}/out: another run writes to it (process {first.pid} on "
        )
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    code, said = run(tmp_path, name, "epochs=1", "max_steps_per_epoch=2")  # which is gone
    assert code == 0, said
    assert not lock.exists()


def test_a_student_answers_by_the_config_that_is_written(config, tmp_path):
    name = config(make=tiny_kd_config, max_steps_per_epoch=2)
    code, said = run(tmp_path, name, recipe=KD)
    assert code == 0, said
    generation = yaml.safe_load(Path(tmp_path, "out/generation.yaml").read_text())
    assert generation["model"] == tiny.MODEL
