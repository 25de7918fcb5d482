"""Update steps of pairs, and the gradients of each computed pair by pair in plain PyTorch and float64."""

import copy

import tiny
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torchtune import config
from torchtune.modules.peft import disable_adapter

from recipe_utils.data.loader.sampler import epoch_permutation

NUM_PAIRS, PAIRS_PER_STEP = 17, 8  # the last update step holds a single pair
SIDES = ("chosen", "rejected")


def answers(model, pair):
    """Summed log-probability and number of targets of each side, a forward for each."""
    sums, numbers = [], []
    for side in SIDES:
        tokens = torch.tensor([pair[f"{side}_input_ids"]])
        labels = torch.tensor(pair[f"{side}_labels"])[1:]
        log_probs = F.log_softmax(model(tokens)[0, :-1], dim=-1)
        is_target = labels != tiny.IGNORE
        picked = log_probs[is_target].gather(1, labels[is_target].unsqueeze(1))
        sums.append(picked.sum())
        numbers.append(int(is_target.sum()))
    return sums, numbers


def metrics_and_gradients(policy, reference, pairs, loss, sft_loss_weight=0.0):
    """Means over the pairs, and the gradient by parameter name."""
    loss_fn = config.instantiate(OmegaConf.create(loss))
    normalizes = getattr(loss_fn, "normalizes_length", False)
    policy.zero_grad()
    total, found, chosen_sum, num_chosen = 0.0, [], 0.0, 0
    for pair in pairs:
        sums, numbers = answers(policy, pair)
        with torch.no_grad():
            if reference is policy:
                with disable_adapter(policy):
                    of_reference, _ = answers(policy, pair)
            else:
                of_reference, _ = answers(reference, pair)
        given = [*sums, *of_reference]
        if normalizes:
            given = [value / number for value, number in zip(given, numbers * 2, strict=True)]
        losses, chosen, rejected = loss_fn(*(value.view(1) for value in given))
        total = total + losses.sum() / len(pairs)
        chosen_sum, num_chosen = chosen_sum + sums[0], num_chosen + numbers[0]
        of_pair = [chosen, rejected, chosen - rejected, (chosen > rejected).double(), *sums]
        found.append(torch.stack([value.detach().squeeze() for value in of_pair]))
    total = total - sft_loss_weight * chosen_sum / num_chosen
    total.backward()
    names = (
        "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "log_probs/chosen",
        "log_probs/rejected",
    )  # fmt: skip
    means = torch.stack(found).mean(0).tolist()
    metrics = {"loss": total.item(), **dict(zip(names, means, strict=True))}
    return metrics, {n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad}


def models_of(sizes):
    """Policy and reference; with adapters the same."""
    if "lora_rank" in sizes:
        model = tiny.adapted_model(sizes).double()
        return model, model
    policy = tiny.tiny_model(sizes).double()
    reference = copy.deepcopy(tiny.tiny_model(sizes, seed=1).double())
    return policy, reference


def reference_of_steps(sizes, kind, loss, sft_loss_weight=0.0):
    """Metrics and gradients of each update step of an epoch."""
    policy, reference = models_of(sizes)
    pairs = tiny.make_pairs(NUM_PAIRS, kind)
    order = epoch_permutation(NUM_PAIRS, epoch=0, shuffle=True).tolist()
    with tiny.float64_throughout():
        return [
            metrics_and_gradients(
                policy,
                reference,
                [pairs[i] for i in order[start : start + PAIRS_PER_STEP]],
                loss,
                sft_loss_weight,
            )
            for start in range(0, NUM_PAIRS, PAIRS_PER_STEP)
        ]
