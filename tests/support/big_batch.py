"""Two hard update steps, and the gradients of each as one big batch in plain PyTorch and float64."""

import tiny
import torch
import torch.nn.functional as F

from recipe_utils.data.loader.sampler import epoch_permutation

TOLERANCE = 1e-10
NUM_SAMPLES = 19  # no multiple of 16: the last update step holds 3 samples
DATA = {
    "_component_": "tiny.tiny_dataset",
    "num_samples": NUM_SAMPLES,
    "num_without_targets": 3,
    "mask_prompts": False,
}
STEP_OF_16 = {"dataset": DATA, "global_batch_size": 16, "gradient_accumulation_steps": ...}
"""Of a config: shuffled update steps of 16 samples, with uneven numbers of targets or none."""
MIXED = [
    {**DATA, "num_samples": 7, "num_without_targets": 1, "seed": 1, "name": "chat", "loss_weight": 0.3},
    {**DATA, "num_samples": 10, "num_without_targets": 1, "seed": 2, "name": "code"},
    {**DATA, "num_samples": 2, "num_without_targets": 1, "seed": 4, "name": "math", "loss_weight": 2},
]  # fmt: skip
"""As many samples, of three named datasets, the third without a target in the last update step."""
HELD_OUT = [
    {**DATA, "num_samples": 5, "num_without_targets": 1, "seed": 5, "name": "code"},
    {**DATA, "num_samples": 4, "num_without_targets": 1, "seed": 6, "name": "else"},
]
"""Two named datasets for validation."""


def reference_gradients(sizes):
    """The gradients of each update step of ``STEP_OF_16`` by parameter name."""
    has_adapters = "lora_rank" in sizes
    model = (tiny.adapted_model if has_adapters else tiny.tiny_model)(sizes).double()
    samples = tiny.make_samples(NUM_SAMPLES, num_without_targets=3, mask_prompts=False)
    order = epoch_permutation(NUM_SAMPLES, epoch=0, shuffle=True).tolist()
    with tiny.float64_throughout():
        return [
            tiny.big_batch_gradients(model, [samples[i] for i in step])[1]
            for step in (order[:16], order[16:])
        ]


def samples_of(datasets):
    """Samples of a list of tiny datasets, with the index of each one's dataset."""
    names = ("num_samples", "num_without_targets", "mask_prompts", "seed")
    made = [tiny.make_samples(*(part[name] for name in names)) for part in datasets]
    return [(i, sample) for i, dataset in enumerate(made) for sample in dataset]


def sums_and_counts(model, samples, num_datasets):
    """Cross-entropy of each dataset's targets, and their number."""
    sums, counts = [0.0] * num_datasets, [0] * num_datasets
    for i, sample in samples:
        tokens, labels = (torch.tensor(sample[key])[None] for key in ("tokens", "labels"))
        sums[i] += F.cross_entropy(model(tokens)[0, :-1], labels[0, 1:], reduction="sum")
        counts[i] += int((labels[0, 1:] != tiny.IGNORE).sum())
    return sums, counts


def weighted_references(sizes, loss_weights):
    """By update step of ``MIXED``: gradients, the loss, and by dataset its mean and number of targets."""
    model, found = tiny.tiny_model(sizes).double(), []
    weights = [part.get("loss_weight", 1.0) for part in MIXED]
    samples = samples_of(MIXED)
    order = epoch_permutation(NUM_SAMPLES, epoch=0, shuffle=True).tolist()
    for step in (order[:16], order[16:]):
        model.zero_grad()
        sums, counts = sums_and_counts(model, [samples[i] for i in step], 3)
        trained = [i for i in range(3) if counts[i]]
        if loss_weights == "tokens":
            total = sum(weights[i] * counts[i] for i in trained)
            loss = sum(weights[i] * sums[i] for i in trained) / total
        else:
            total = sum(weights[i] for i in trained)
            loss = sum(weights[i] * sums[i] / counts[i] for i in trained) / total
        loss.backward()
        means = {MIXED[i]["name"]: (sums[i].item() / counts[i], counts[i]) for i in trained}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append((gradients, loss.item(), means))
    return found


def validation_losses(sizes):
    """The mean loss of each dataset of ``HELD_OUT``, and of all, by metric."""
    sums, counts = sums_and_counts(tiny.tiny_model(sizes).double(), samples_of(HELD_OUT), 2)
    means = {f"val_loss/{HELD_OUT[i]['name']}": sums[i].item() / counts[i] for i in range(2)}
    return {"val_loss": sum(sums).item() / sum(counts), **means}


def error(gradients, reference):
    """Largest deviation relative to the reference's largest entry, over the parameters in ``gradients``."""
    scale = max(grad.abs().max().item() for grad in reference.values())
    return max((grad - reference[n]).abs().max().item() for n, grad in gradients.items()) / scale
