"""Two hard update steps, and the gradients of each as one big batch in plain PyTorch and float64."""

import tiny

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


def error(gradients, reference):
    """Largest deviation relative to the reference's largest entry, over the parameters in ``gradients``."""
    scale = max(grad.abs().max().item() for grad in reference.values())
    return max((grad - reference[n]).abs().max().item() for n, grad in gradients.items()) / scale
