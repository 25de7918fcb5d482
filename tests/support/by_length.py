"""A curriculum as a user writes it: update steps of ever longer samples.

In ``setup`` of a recipe, below the line that builds its loaders::

    order = ByLength(self.loader.dataset, settings.samples_per_update_step(ranks.dp_degree))
    self.loader = replace(self.loader, order=order)

Samples of 5, 3, 9, 2 and 7 tokens, 2 in an update step, are [3, 1], [0, 4] and [2]: 2 and 3, 5 and 7, 9 tokens. Each
epoch draws another order within an update step.
"""

import numpy as np

from recipe_utils.update_steps.order import Order


class ByLength(Order):
    """Order of the samples of a dataset by their number of tokens."""

    def __init__(self, dataset, samples_per_step):
        dataset = dataset.unread()  # a copy: the threads that train open files themselves
        self.lengths = [len(dataset[index]["tokens"]) for index in range(len(dataset))]
        self.samples_per_step = samples_per_step
        self.sorted = np.argsort(self.lengths, kind="stable")

    def num_steps(self, epoch):
        return -(-len(self.sorted) // self.samples_per_step)

    def samples(self, epoch, step):
        first = step * self.samples_per_step
        samples = self.sorted[first : first + self.samples_per_step]
        return np.random.default_rng([epoch, step]).permutation(samples)

    def end(self, epoch, step):
        return (step + 1) * self.samples_per_step

    def fingerprint(self):
        return {"order": "by length"}
