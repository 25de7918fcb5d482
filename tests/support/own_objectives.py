"""Objectives as authors write them: a balance of experts, noise on embeddings, and a teacher's likeliest tokens."""

from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import tiny
import torch
import torch.distributed as dist

from recipe_utils.losses import LinearCrossEntropyLoss


class BalancedLoss(LinearCrossEntropyLoss):
    """Cross-entropy plus weight * E * sum over E experts of f P (arXiv:2101.03961).

    f are the experts that a token chooses, P their probabilities: means over all real tokens of the update step, on
    all ranks, and all layers. f has no gradient, so once it is counted the term is a sum over tokens.
    """

    sums = ("loss", "balance")

    def __init__(self, weight):
        super().__init__()
        self.weight, self.factors, self.num_layers = weight, 0.0, 0

    def watch(self, trained, ranks):
        """Returns the pass before the pass, which counts with the trained model."""
        self.trained, self.ranks = trained, ranks
        # Before the hook that takes the targets for the loss.
        trained.model.module.register_forward_pre_hook(self.start, prepend=True, with_kwargs=True)
        for module in trained.model.module.modules():
            if type(module).__name__.endswith("Router"):
                module.register_forward_hook(self.keep)
                self.num_layers += 1
        return self.attached

    def start(self, model, args, kwargs):
        self.is_real, self.probs = self.real(kwargs["targets"].owners.flatten()), []

    def real(self, owners):
        return owners >= 0

    def keep(self, router, args, output):
        logits, _, chosen = output
        self.probs.append(logits[self.is_real].softmax(1).sum(0))
        if not torch.is_grad_enabled():
            self.chosen = self.chosen + chosen[self.is_real].flatten().bincount(minlength=logits.size(1))

    @contextmanager
    def attached(self, step):
        self.chosen = 0
        self.trained.outputs(step.microbatches)
        chosen = self.over_ranks(self.chosen)
        # Sums over tokens and layers become means; the recipe divides by its own divisor.
        num_routed = step.totals["real_tokens"] * self.num_layers
        self.factors = chosen.double() * len(chosen) / num_routed**2 * step.totals[self.divisor]
        yield step.microbatches

    def over_ranks(self, counts):
        dist.all_reduce(counts, group=self.ranks.dp_group)
        return counts

    def forward(self, output, hidden, targets, backward_in_parts=False):
        cross_entropy = super().forward(output, hidden, targets, backward_in_parts)
        balance = (self.factors * torch.stack(self.probs).sum(0)).sum()
        return torch.stack([cross_entropy + self.weight * balance, balance.detach()])


class Noise:
    """Uniform noise of size alpha / sqrt(L d) on the L embeddings of each sample (NEFTune, arXiv:2310.05914).

    It is drawn from the seed, the update step and the sample's place in it: alike on any layout and after a resume.
    """

    def __init__(self, run, model, alpha):
        self.run, self.alpha = run, alpha
        for module in model.modules():  # none on later pipeline stages
            if isinstance(module, torch.nn.Embedding):
                module.register_forward_hook(self.add)

    @contextmanager
    def attached(self, step):
        self.microbatches = iter(step.microbatches)  # in the order of their forwards, also in pipelines
        yield step.microbatches

    def add(self, embeddings, args, embedded):
        if embeddings.training:
            inputs, targets = (microbatch := next(self.microbatches)).inputs, microbatch.targets
            owners, documents = targets.owners, inputs.get("document_lengths")
            lengths = (owners >= 0).sum(1).tolist() if documents is None else documents.lengths[0]
            positions = inputs.get("input_pos", torch.arange(owners.size(1)).expand_as(owners))
            noise = torch.zeros(embedded.shape, dtype=torch.float64)
            for sequence, place in enumerate(self.places(targets)):
                shape, is_own = (lengths[sequence], embedded.size(2)), owners == sequence
                drawn = np.random.default_rng([self.run.seed, self.run.global_step, place]).uniform(-1, 1, shape)
                noise[is_own] = torch.from_numpy(drawn)[positions[is_own]] * self.alpha / np.prod(shape) ** 0.5
            embedded = embedded + noise.to(embedded)
        return embedded

    def places(self, targets):
        return targets.samples.tolist()


def likeliest_tokens(sample):
    """Returns ids and log-probabilities [t, 5] of the likeliest tokens of a teacher that is drawn for a sample's tokens."""
    logits = np.random.default_rng(sample["tokens"]).normal(size=(len(sample["tokens"]), tiny.VOCAB_SIZE))
    log_probs, ids = torch.from_numpy(logits).log_softmax(1).topk(5)
    return {"ids": ids.numpy(), "log_probs": log_probs.numpy()}


def likeliest_dataset(tokenizer, **keys):
    return tiny.Samples([{**s, **likeliest_tokens(s)} for s in tiny.tiny_dataset(tokenizer, **keys).samples])


class LikeliestLoss(torch.nn.Module):
    """Divergence KL(teacher || student) of the teacher's likeliest tokens, without a remainder."""

    takes_hidden_states, ignore_index = True, tiny.IGNORE
    columns: ClassVar = {"ids": None, "log_probs": None}

    def forward(self, output, hidden, targets, backward_in_parts=False):
        student = output(hidden.flatten(0, 1)[targets.positions]).log_softmax(1)
        teacher = targets.values["log_probs"]
        return (teacher.exp() * (teacher - student.gather(1, targets.values["ids"].long()))).sum()
