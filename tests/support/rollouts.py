"""Given rollouts: groups of answers to a prompt, as samples of one answer or of a group, and losses on them."""

import random
import re

import torch
from big_batch import targets_of
from recipe_runs import SFT, section_of

from recipe_utils.cli.registry import recipe_path
from recipe_utils.losses.log_probs import LinearLogProbs

ANSWERS_PER_GROUP = 3


def make_groups(num_groups, seed=0):
    """Returns prompts, answers, advantages and log-probabilities, some of which make ratios that are clipped."""
    draw = random.Random(seed)

    def tokens(least, most):
        return [draw.randint(1, 60) for _ in range(draw.randint(least, most))]

    def answer():
        ids = tokens(1, 12)
        return ids, draw.gauss(0, 1), [-4.2 + draw.gauss(0, 0.3) for _ in ids]

    return [(tokens(2, 20), [answer() for _ in range(ANSWERS_PER_GROUP)]) for _ in range(num_groups)]


class Groups:
    """Groups as samples of sequences; also 1 / length beside each token of an answer."""

    makes_trees = True

    def __init__(self, num_groups):
        self.groups = make_groups(num_groups)

    def __len__(self):
        return len(self.groups)

    def __getitem__(self, index):
        from my_objective import Rollouts  # of the page

        sample = Rollouts(self.groups)[index]
        for sequence, (answer, *_) in zip(sample["sequences"], self.groups[index][1], strict=True):
            sequence["per_answer"] = [1 / len(answer)] * len(sequence["tokens"])
        return sample


def groups(tokenizer, num_groups):
    return Groups(num_groups)


class GradedGroups(Groups):
    """Groups with advantages alone."""

    def __getitem__(self, index):
        prompt, answers = self.groups[index]
        nothing = [-100] * len(prompt)
        return {
            "sequences": [
                {"tokens": prompt + ids, "labels": nothing + ids, "advantages": [advantage] * len(prompt + ids)}
                for ids, advantage, _ in answers
            ]
        }


def graded_groups(tokenizer, num_groups):
    return GradedGroups(num_groups)


def answers(tokenizer, num_groups):
    """Returns each answer as a sample of its own, in the order of the groups."""
    return [
        sequence for group in map(Groups(num_groups).__getitem__, range(num_groups)) for sequence in group["sequences"]
    ]


def write_objective(folder):
    """Writes the loss and the dataset of "Writing a recipe" as a module."""
    section = section_of(recipe_path(SFT).with_name("writing_a_recipe.md"), "## 12.")
    (folder / "my_objective.py").write_text("\n".join(re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)))


class LossByAnswers(LinearLogProbs):
    """Mean over answers of the clipped ratio of each, with a KL to the start beside it."""

    columns = {"advantages": None, "logprobs": None, "per_answer": None}  # noqa: RUF012
    divisor = "per_answer"
    sums = ("loss", "kl")

    def forward(self, output, hidden, targets, backward_in_parts=False):
        log_probs = super().forward(output, hidden, targets, backward_in_parts)
        advantages, sampled, per_answer = (targets.values[name] for name in self.columns)
        ratio, log_ratio = (log_probs - sampled).exp(), targets.outputs["start"] - log_probs
        kl = per_answer * (log_ratio.exp() - 1 - log_ratio)
        loss = -per_answer * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return torch.stack([(loss + 0.3 * kl).sum(), kl.detach().sum()])


def policy_gradient(model, start, samples, by_answers):
    """Returns the loss and what is logged beside it, of single answers."""
    losses, clipped, kls = [], [], []
    for sample in samples:
        logits, labels = targets_of(model, sample)
        picked, before = (
            x.log_softmax(-1)[range(len(labels)), labels] for x in (logits, targets_of(start, sample)[0].detach())
        )
        advantages, sampled = (
            torch.tensor(sample[key], dtype=torch.float64)[-len(labels) :] for key in ("advantages", "logprobs")
        )
        ratio = (picked - sampled).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = (before - picked).exp() - 1 - (before - picked)
        losses.append(loss + 0.3 * kl * by_answers)
        clipped.append((ratio != ratio.clamp(0.8, 1.2)).double())
        kls.append(kl.detach())
    if by_answers:
        return {name: torch.stack([x.mean() for x in of]).mean() for name, of in (("loss", losses), ("kl", kls))}
    return {name: torch.cat(of).mean() for name, of in (("loss", losses), ("clipped", clipped))}
