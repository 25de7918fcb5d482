"""Packed, concatenated and image data: the gradient is that of the samples by themselves."""

from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from big_batch import big_batch, error
from distributed_runs import run_distributed
from recipe_runs import STOCK_LOSS, run_recipe, run_recipe_recording_gradients, slow

OWN_LOSS = {"_component_": "recipe_utils.losses.LinearCrossEntropyLoss"}
DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 24, "mask_prompts": False}
PACKED = {**DATA, "packed": True}
LIST = [{**DATA, "num_samples": 10, "seed": seed} for seed in (0, 1)]


@pytest.mark.parametrize(
    ("dataset", "loss", "world_size"),
    [(PACKED, OWN_LOSS, 1), slow(PACKED, STOCK_LOSS, 2), slow(LIST, OWN_LOSS, 1)],
    ids=["packed", "packed-stock", "list"],
)
def test_the_gradient_is_that_of_separate_samples(dataset, loss, world_size, tiny_config):
    """Every token is a target: stock predicts a document's first token from the document before."""
    config = tiny_config(dataset=dataset, loss=loss, batch_size=2, gradient_accumulation_steps=10)
    samples = tiny.make_samples(24, mask_prompts=False)
    if dataset is LIST:
        samples = [s for seed in (0, 1) for s in tiny.make_samples(10, 0, False, seed)]
    with tiny.float64_throughout():
        _, reference = big_batch(tiny.tiny_model().double(), samples)
    # torchtune's own unembed rounds the logits to fp32 for the stock losses
    tolerance = 1e-10 if loss == OWN_LOSS else 1e-6
    for (gradients,) in run_distributed(run_recipe_recording_gradients, world_size, config):
        assert gradients.keys() == reference.keys()
        assert error(gradients, reference) < tolerance


@pytest.mark.parametrize(("num_workers", "is_listed"), [(0, False), (2, True)])
def test_a_dataset_that_opens_its_file_at_the_first_read_trains(num_workers, is_listed, tiny_config, tmp_path):
    """Two epochs with validation: each is read by a thread, or workers, of its own."""
    data = {"_component_": "tiny.sqlite_dataset", "path": str(tmp_path / "samples.db"), "num_samples": 12}
    in_memory = {"_component_": "tiny.tiny_dataset", "num_samples": 12, "num_without_targets": 0}
    losses = []
    for dataset in (data, in_memory):
        config = tiny_config(
            dataset=[{**dataset, "name": "rows"}] if is_listed else dataset,
            dataset_val=dataset,
            run_val_every_n_steps=2,
            epochs=2,
            num_workers=num_workers,
        )
        (logged,) = run_distributed(run_recipe, 1, config)
        losses.append([(line.get("loss"), line.get("val_loss")) for line in logged])
    assert losses[0] == losses[1]
    assert len(losses[0]) > 4


@pytest.mark.parametrize("sample_losses", [False, True])
def test_rows_of_joined_samples_train_but_have_no_losses_by_sample(sample_losses, tiny_config):
    model = {**tiny.MODEL, "max_seq_len": 128}
    config = tiny_config(collate_fn="tiny.collate_joined", model=model, sample_losses=sample_losses)
    if sample_losses:
        with pytest.raises(ValueError, match="collate_fn: it made another number of rows than samples"):
            run_recipe(config)
    else:
        assert run_recipe(config)[0]["loss"] > 0


@pytest.fixture
def fusion_weights(weights_folder):
    path = weights_folder / "weights" / "fusion.pt"
    model = tiny.tiny_fusion_model()
    torch.save(model.state_dict(), path)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("loss", [OWN_LOSS, STOCK_LOSS], ids=["own", "stock"])
def test_a_fusion_model_trains_on_images_with_its_own_collate_fn(loss, tiny_config, fusion_weights):
    """3 samples on 2 ranks: the rank without a last sample runs an image without targets."""
    config = tiny_config(
        model={"_component_": "tiny.tiny_fusion_model"},
        dataset={"_component_": "tiny.tiny_image_dataset", "num_samples": 3},
        collate_fn="tiny.collate_images",
        loss=loss,
        batch_size=1,
        gradient_accumulation_steps=2,
        clip_grad_norm="inf",
    )
    config["checkpointer"]["checkpoint_files"] = ["fusion.pt"]
    ((metrics,), _) = run_distributed(run_recipe, 2, config)

    dataset = tiny.tiny_image_dataset(None, 3)
    loss_sum, num_targets = 0.0, 0
    for sample in dataset.samples:
        tokens, labels = torch.tensor([sample["tokens"]]), torch.tensor(sample["labels"])[1:]
        logits = fusion_weights(tokens, encoder_input={"images": sample["image"][None]})
        loss_sum += F.cross_entropy(logits[0, :-1], labels, reduction="sum")
        num_targets += int((labels != tiny.IGNORE).sum())
    (loss_sum / num_targets).backward()
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in fusion_weights.parameters()])
    assert metrics["num_tokens"] == num_targets
    assert metrics["loss"] == pytest.approx(loss_sum.item() / num_targets, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(grad_norm.item(), rel=1e-4)


@pytest.mark.slow
def test_adapters_of_a_fusion_model_are_found_under_its_own_names(tiny_config, fusion_weights):
    config = tiny_config(
        model={"_component_": "tiny.adapted_fusion_model"},
        dataset={"_component_": "tiny.tiny_image_dataset", "num_samples": 8},
        collate_fn="tiny.collate_images",
        batch_size=1,
        gradient_accumulation_steps=2,
    )
    config["checkpointer"]["checkpoint_files"] = ["fusion.pt"]
    for _ in range(2):  # the second run resumes and only exports
        run_distributed(run_recipe, 2, config)
        exported = Path(config["output_dir"], "epoch_0")
        adapters = torch.load(exported / "adapter" / "adapter_model.pt", weights_only=True)
        name = "decoder.layers.1.attn.q_proj"
        assert adapters.keys() == {f"{name}.lora_a.weight", f"{name}.lora_b.weight"}
        (merged,) = exported.glob("*.bin")
        merged = torch.load(merged, weights_only=True)
        base = fusion_weights.state_dict()
        assert merged.keys() == base.keys()
        assert {n for n in base if not torch.equal(base[n], merged[n])} == {f"{name}.weight"}
        config["resume_from_checkpoint"] = "auto"
