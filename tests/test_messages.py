"""The output of a run is short; user errors are reported once, last and without a traceback."""

import json
import re

import pytest
import tiny
import yaml
from programs import lines_on, tune_run_here
from recipe_runs import SFT
from recipe_runs import tiny_config as make_tiny_config

DISK_LOGGER = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "${output_dir}/logs"}


@pytest.fixture
def run(weights_folder, tmp_path):
    """Runs a tiny config, changed in its file and then on the command line."""

    def run_with(changes, *overrides):
        config = make_tiny_config(weights_folder, metric_logger=DISK_LOGGER, **changes)
        return run_in(tmp_path, config, *overrides)

    return run_with


def run_in(folder, config, *overrides):
    config["output_dir"] = config["checkpointer"]["output_dir"] = str(folder / "out")
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    return tune_run_here(SFT, "my.yaml", *overrides, cwd=folder)


@pytest.fixture(scope="module")
def whole(weights_folder, tmp_path_factory):
    """Returns folder, output and metrics of three epochs."""
    folder = tmp_path_factory.mktemp("whole")
    config = make_tiny_config(
        weights_folder,
        metric_logger=DISK_LOGGER,
        dataset_val={"_component_": "tiny.tiny_dataset", "num_samples": 8},
        run_val_every_n_steps=2,
        epochs=3,
        keep_best_checkpoint=True,
        gradient_accumulation_steps=4,
        sample_prompts=["Why?"],
        sample_every_n_steps=5,
        microbatching="packed",
        max_tokens_per_microbatch=32,
    )
    code, screen = run_in(folder, config)
    assert code == 0, screen
    metrics = (folder / "out/logs/metrics.jsonl").read_text().splitlines()
    return folder, screen, {line["step"]: line for line in map(json.loads, metrics)}


def test_the_output_has_lines_of_messages_and_nothing_else(whole):
    folder, screen, _ = whole
    written = yaml.safe_load((folder / "out/logs/config.yaml").read_text())
    assert written == yaml.safe_load((folder / "my.yaml").read_text().replace("${output_dir}", str(folder / "out")))
    for noise in ("with resolved config", "export.tmp", "Profiling disabled", "successfully", "Saving final"):
        assert noise not in screen
    starts = ("warning: max_tokens_per_micro", "Exported to ", "update step 5 | Why? -> ")
    first = (
        "Model: llama3_2, ", "Data: 32 samples; 32 of them read: ",
        "Update steps: 12 (3 epochs of 4), 8 samples each, packed", "Run ", "Before the first update",
    )  # fmt: skip
    for start in (*starts, *first):
        assert any(line.startswith(start) for line in lines_on(screen)), start


def test_the_progress_bar_shows_the_update_step_that_is_done(whole):
    _, screen, metrics = whole
    pattern = (
        r"epoch (\d) of 3 \| loss (\d\.\d{3}) \| norm ([\d.]+) \| lr 1\.0e-2 \| [\d.]+k? tok/s"
        r" \| val (\d\.\d\d) +\d+%\|.*?\| (\d+)/12 "
    )
    shown = re.findall(pattern, screen)
    assert len(shown) > 3
    for epoch, loss, norm, val, done in shown:
        of_step = metrics[int(done)]
        assert int(epoch) == of_step["epoch"] + 1
        assert (loss, norm) == (f"{of_step['loss']:.3f}", f"{of_step['grad_norm']:.3g}")
        until = [m for step, m in metrics.items() if step <= of_step["step"] and "val_loss" in m]
        assert val == f"{until[-1]['val_loss']:.2f}"


def test_the_end_has_a_summary_and_a_command_that_loads_the_model(whole):
    folder, screen, metrics = whole
    done, loss, val, model, ask = lines_on(screen)[-5:]
    assert [step for step, line in metrics.items() if "val_loss" in line] == [0, 2, 4, 6, 8, 10, 12]
    num_tokens = sum(line.get("num_tokens", 0) for line in metrics.values())
    totals = rf"12 update steps, {num_tokens:,} target tokens in [\d:]+ \([\d,]+ tokens/s\)"
    assert re.fullmatch(totals, done)
    assert loss.startswith("loss: first ")
    losses = {step: m["val_loss"] for step, m in metrics.items() if "val_loss" in m}
    first, *_, last = losses.values()
    best = min(losses, key=losses.get)
    expected = f"first {first:.3f}, last {last:.3f}, best {losses[best]:.3f} (update step {best})"
    assert val == f"val_loss: {expected}"
    assert model == f"Model: {folder}/out/epoch_2"
    assert f"tune run generate --config {folder}/out/generation.yaml prompt.user='...'" in ask
    generation = yaml.safe_load((folder / "out/generation.yaml").read_text())
    assert generation["checkpointer"]["checkpoint_dir"] == f"{folder}/out/epoch_2"
    assert generation["model"] == tiny.MODEL


DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 32}
BAD = {**DATA, "replace": {"9": {"tokens": [1, 900], "labels": [1, 1]}}}
DEADLY = {"_component_": "tiny.killing_dataset", "num_samples": 32, "index": 9, "folder": None}
SCHEDULE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
GIVEN = {
    "lr_scheduler": {"_component_": SCHEDULE, "num_warmup_steps": 2},
    "max_steps_per_epoch": 3,
    "shuffle": False,
    "model": {**tiny.MODEL, "rope_base": 10_000},
}
ERRORS = {  # changes in the file and on the command line, exit code, start of the last line
    "sample": ({"dataset": BAD}, [], 1, "error: sample 9 of dataset: token 900 is outside"),
    "sample of a worker": ({"dataset": BAD}, ["num_workers=1"], 1, "error: sample 9 of dataset: token 900 is"),
    "worker": ({"dataset": DEADLY}, ["num_workers=1"], 1, "error: num_workers=1: a DataLoader worker"),
    "gradient": ({}, ["optimizer.lr=1e30", "log_every_n_steps=100"], 1, "error: "),
    "keys": ({}, ["batchsize=3", "optimizer.lr=fast"], 2, "  - optimizer.lr='fast': AdamW takes float | torch.Tensor"),
    "data": ({"dataset": {**DATA, "num_without_targets": 32}}, [], 2, "  - dataset: none of its 32 samples can be trained on"),
    "checkpoint": ({}, ["resume_from_checkpoint=True"], 2, "  - resume_from_checkpoint=True: there is no"),
    "key to remove": ({}, ["~lr_schedule"], 2, "  - ~lr_schedule: the config has no such key to"),
    "part to remove": ({}, ["~model.rope_bas"], 2, "  - ~model.rope_bas: the config has no such key to"),
    "two signs": ({}, ["epochs=1=2"], 2, "  - command line or YAML: Command-line overrides must be in the form of key=value, got epochs=1=2; set a"),
    "override": ({}, ["epochs"], 2, "  - command line or YAML: Command-line overrides must be in the form"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_a_user_error_is_reported_once_and_last(case, run, tmp_path):
    changes, overrides, expected_code, text = ERRORS[case]
    code, screen = run({**GIVEN, **changes}, *overrides)
    assert code == expected_code, screen
    assert "Traceback" not in screen
    last = lines_on(screen)[-1]
    assert last.startswith(text)
    assert screen.count(last) == 1
    if case == "gradient":
        assert "on_nonfinite=stop" in last
    assert not (tmp_path / "out/epoch_0").exists()


OWN_COMPONENTS = """
import tiny
class Mine(tiny.Samples):
    def __getitem__(self, index):
        return self.samples[{5: 'five'}.get(index, index)]
def mine(tokenizer):
    return Mine(tiny.make_samples(8))
def collate(samples, padding_idx, ignore_idx):
    raise ArithmeticError('planted')
def tokenizer(max_seq_len=8):
    return 1 + '1'
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_traceback_of_a_user_s_dataset_comes_before_the_error(num_workers, run, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_COMPONENTS)
    data = {"_component_": "mine.mine"}
    code, screen = run({"shuffle": False, "dataset": data}, f"num_workers={num_workers}")
    assert code == 1
    *before, last = lines_on(screen)
    reason = "list indices must be integers or slices, not str"
    assert last == f"error: sample 5 of dataset: TypeError: {reason}"
    assert "mine.py" in " ".join(before)
    assert screen.count("Traceback") == 1


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("collate_fn=mine.collate", "ArithmeticError: planted"),
        ("tokenizer=mine.tokenizer", "raised while tokenizer of the config was made"),
    ],
)
def test_a_bug_in_a_user_s_component_has_a_traceback(override, text, run, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_COMPONENTS)
    code, screen = run({}, override)
    assert code == 1
    assert "Traceback" in screen
    assert text in screen


@pytest.mark.parametrize(
    "override",
    ["~lr_scheduler", "lr_scheduler=null", "metric_logger=null", "~metric_logger", "~model.rope_base", "~seed"],
)
def test_components_can_be_removed_on_the_command_line(override, run, tmp_path):
    code, screen = run(GIVEN, override)
    assert code == 0, screen
    if "metric_logger" not in override:
        saved = yaml.safe_load((tmp_path / "out/torchtune_config.yaml").read_text())
        assert saved.get(re.split(r"[.=]", override.strip("~"))[0]) in (None, tiny.MODEL)
