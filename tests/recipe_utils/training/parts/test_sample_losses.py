"""Losses by sample continue after a resume, with names of datasets; test_gradients.py has their values."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import DPO, SFT, STEP_OF_8, call_in_step, losses, run_recipe, set_up, slow, writing_to  # fmt: skip

from recipe_utils.plot import __main__ as plot
from recipe_utils.update_steps.permutation import epoch_permutation
from recipe_utils.update_steps.samples import CheckedDataset

DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 19, "seed": 1, "name": "chat"}
ALSO = {**DATA, "num_samples": 11, "seed": 2, "name": "code"}


def train(config, stop_after=None, halves_positions=False):
    """Trains two epochs of 4 update steps, or until ``stop_after``."""
    with pytest.MonkeyPatch.context() as patches, set_up(config) as recipe:
        get = CheckedDataset._get

        def get_at_half(self, at):
            return get(self, at._replace(position=at.position // 2))

        call_in_step(recipe, stop_after, recipe.run.stop.set)
        if halves_positions:
            patches.setattr(CheckedDataset, "_get", get_at_half)
        recipe.train()


@pytest.mark.parametrize("make", ["tiny_config", slow("tiny_dpo_config")])
def test_losses_of_samples_sum_to_the_logged_loss(make, request):
    """Samples are weighted by targets, pairs equally. The unweighted mean over samples differs.

    Validation, with larger update steps, is not in them.
    """
    config = request.getfixturevalue(make)(sample_losses=True, microbatching="packed", **STEP_OF_8)
    config |= {"dataset_val": config["dataset"], "run_val_every_n_steps": 1, "batch_size_val": 12}
    logged = run_distributed(run_recipe, 2, config, SFT if make == "tiny_config" else DPO)[0]
    (found,) = np.load(Path(config["output_dir"], "logs", "sample_losses.npy"))
    numbers = np.ones_like(found)
    if make == "tiny_config":
        labels = [np.array(sample["labels"][1:]) for sample in tiny.make_samples(len(found))]
        numbers = np.array([(of_sample != tiny.IGNORE).sum() for of_sample in labels])
    order = epoch_permutation(len(found), 0, shuffle=True).numpy()
    steps = [order[start : start + 8] for start in range(0, len(found), 8)]
    sums = [np.average(found[step], weights=numbers[step]) for step in steps]
    assert losses(logged) == pytest.approx(sums, rel=1e-6)
    if make == "tiny_config":
        assert losses(logged) != pytest.approx([found[step].mean() for step in steps], rel=1e-3)


def test_a_resumed_training_continues_the_file_on_other_ranks(tiny_config, tmp_path, capsys):
    config = tiny_config(dataset=[DATA, ALSO], epochs=2, sample_losses=True, **STEP_OF_8)
    config["optimizer"] = {**config["optimizer"], "lr": 0.03}
    runs = {name: writing_to(tmp_path / name, config) for name in ("whole", "parts", "wrong")}
    run_distributed(train, 1, runs["whole"])
    run_distributed(train, 2, runs["parts"], 6)
    in_parts = Path(runs["parts"]["output_dir"], "logs", "sample_losses.npy")
    assert np.isnan(np.load(in_parts)[1]).sum() == 30 - 16
    run_distributed(train, 1, resuming_in(runs["parts"]["output_dir"], config))
    run_distributed(train, 2, runs["wrong"], None, True)  # as if each rank counted its samples alone
    whole, parts, wrong = (np.load(Path(each["output_dir"], "logs", "sample_losses.npy")) for each in runs.values())
    assert whole.shape == (2, 30)
    assert not np.isnan(whole).any()
    assert parts == pytest.approx(whole, rel=1e-3)
    assert np.nan_to_num(wrong) != pytest.approx(whole, rel=0.05)

    highest, *lines = plot.report_of_run(Path(runs["whole"]["output_dir"]))
    assert highest == "Highest losses of 30 trained samples:"
    index = int(whole[1].argmax())
    name, local = ("chat", index) if index < 19 else ("code", index - 19)
    assert lines[0].startswith(f"  {whole[1].max():.3f} (was {whole[0, index]:.3f}) sample {local} of dataset.{name}: ")
    data = DATA if name == "chat" else ALSO
    labels = tiny.make_samples(data["num_samples"], seed=data["seed"])[local]["labels"]
    answer = " ".join(str(label) for label in labels if label >= 0)
    assert lines[0].endswith(f".{name}: {answer[:60]}")
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sys, "argv", ["plot", "--samples", runs["whole"]["output_dir"]])
        plot.main()
        assert capsys.readouterr().out.splitlines() == [highest, *lines]
        patches.setattr(sys, "argv", ["plot", "--samples", str(tmp_path)])
        with pytest.raises(SystemExit, match="train with sample_losses=True"):
            plot.main()
    rose = next(i for i, line in enumerate(lines) if line.startswith("Losses that rose most"))
    assert rose == 20
    index = int((whole[1] - whole[0]).argmax())
    assert lines[rose + 1].startswith(f"  {whole[1, index]:.3f} (was {whole[0, index]:.3f})")
