"""``python -m recipe_utils.show_data`` prints the samples that a recipe trains on, with their targets."""

import re

import pytest
import yaml
from recipe_runs import DINO, DPO, SFT, set_up

from recipe_utils.show_data import __main__ as command


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Runs the command with a config; returns its output."""

    def run(config, *arguments, recipe=SFT):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        argv = ["recipe_utils.show_data", recipe, "--config", str(path), *arguments]
        monkeypatch.setattr("sys.argv", argv)
        try:
            command.main()
        except SystemExit as end:
            if end.code:
                raise
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("kind", ["plain", "mixture", "pairs"])
def test_the_first_samples_of_the_training_are_printed(kind, tiny_config, tiny_dpo_config, printed):
    recipe, config = (DPO, tiny_dpo_config()) if kind == "pairs" else (SFT, tiny_config())
    if kind == "mixture":
        sources = [{**config["dataset"], "name": f"source_{i}", "weight": 3 - i} for i in range(2)]
        config |= {"dataset": sources, "epochs": 2}
    with set_up(config, recipe) as made:
        indices = made.loader.order.samples(0, 0).tolist()
        dataset, order = made.loader.dataset.dataset, made.loader.order
    keys = {"": ("tokens", "labels")}
    if kind == "pairs":
        keys = {f", {side}": (f"{side}_input_ids", f"{side}_labels") for side in ("chosen", "rejected")}
    expected = []
    for index in indices[:3]:
        name = f"{'pair' if kind == 'pairs' else 'sample'} {index} of dataset"
        if kind == "mixture":
            name = f"sample {index % 32} of dataset.source_{index // 32}"
        for side, pair in keys.items():
            tokens, labels = (list(dataset[index][key]) for key in pair)
            trained = [i > 0 and label != -100 for i, label in enumerate(labels)]
            title = f"{name}{side}: {len(tokens)} tokens, {sum(trained)} targets"
            expected.append((title, list(zip(map(str, tokens), trained, strict=True))))
    out, found = printed(config, recipe=recipe), []
    for title, text in re.findall(r"^((?:sample|pair) .*)\n(.*)$", out, re.M):
        is_trained, words = False, []
        for word in re.findall(r"⟦|⟧|\d+", text):
            is_trained = word == "⟦" or (is_trained and word != "⟧")
            words += [(word, is_trained)] if word.isdigit() else []
        found.append((title, words))
    assert found == expected
    assert "\n".join(order.log_lines(2) if kind == "mixture" else ()) in out
    num_samples = {"plain": 32, "mixture": 64, "pairs": 19}[kind]
    bins = [int(number) for number in re.findall(r"tokens +(\d+) #", out)]
    assert sum(bins) == num_samples
    assert max(bins) == out.count("#" * 40) * max(bins)


@pytest.mark.parametrize(
    "words",
    [
        ("dataset={_component_: tiny.tiny_dataset, num_samples: 5}",),
        ("dataset=[{_component_: tiny.tiny_dataset, num_samples: 2, name: a}, {_component_: tiny.tiny_dataset, num_samples: 3, name: b}]",),
        ("~dataset.seed", "dataset.num_samples=5"),
    ],
)  # fmt: skip
def test_the_command_line_is_that_of_a_training(words, printed, tiny_config):
    """A component replaces that of the config, whose other arguments this one does not take."""
    config = tiny_config()
    config["dataset"] = {"_component_": "tiny.tiny_dataset", "num_samples": 9, "seed": 3}
    if "{" in words[0]:
        config["dataset"] = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 9, "kind": "masked"}
    assert "dataset: 5 samples, 5 of them read" in printed(config, *words)


@pytest.mark.parametrize("on_bad_sample", ["raise", "skip"])
def test_samples_that_are_all_bad_are_reported_and_are_an_error(on_bad_sample, printed, tiny_config, capsys):
    replace = {str(index): {"tokens": [1], "labels": [1, 1]} for index in range(2)}
    dataset = {"_component_": "tiny.tiny_dataset", "num_samples": 2, "replace": replace}
    with pytest.raises(SystemExit) as error:
        printed(tiny_config(dataset=dataset, on_bad_sample=on_bad_sample))
    assert error.value.code == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("dataset: 2 samples, 2 of them read\n2 of 2 samples read: ")
    assert captured.err == "error: dataset: none of the samples that were read can be trained on\n"


def test_other_samples_and_wrong_keys_are_refused(printed, tiny_config, capsys):
    for config, recipe, text in (
        (tiny_config(), DINO, "its samples are images; set one of texts or pairs"),
        ({**tiny_config(), "datset": 1}, SFT, "datset: this recipe has no such key; did you mean dataset?"),
        (tiny_config(), DPO, "dataset: its samples have labels, tokens instead of chosen_input_ids"),
    ):
        with pytest.raises(SystemExit) as error:
            printed(config, recipe=recipe)
        assert error.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert text in captured.err
