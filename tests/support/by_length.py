"""A curriculum as a user writes it: update steps of ever longer samples. In the config::

    order: {_component_: by_length.ByLength}

Samples of 5, 3, 9, 2 and 7 tokens, 2 in an update step, are [3, 1], [0, 4] and [2]: 2 and 3, 5 and 7, 9 tokens. Keys
such as ``shuffle`` and ``max_steps_per_epoch`` choose the samples of an epoch, of which this order is one by length.
"""

from functools import lru_cache

import numpy as np

from recipe_utils.update_steps.order import Order


class ByLength(Order):
    """Update steps of the samples of each epoch of another order, by their number of tokens."""

    def __init__(self, order, dataset):
        self.order = order
        self.lengths = np.array([len(dataset[index]["tokens"]) for index in range(len(dataset))])
        self.sorted = lru_cache(maxsize=1)(self.make_sorted)

    def make_sorted(self, epoch):
        samples = np.concatenate([self.order.samples(epoch, step) for step in range(self.order.num_steps(epoch))])
        return samples[np.argsort(self.lengths[samples], kind="stable")]

    def num_steps(self, epoch):
        return self.order.num_steps(epoch)

    def samples(self, epoch, step):
        first = self.order.end(epoch, step - 1) if step else 0
        return self.sorted(epoch)[first : self.order.end(epoch, step)]

    def end(self, epoch, step):
        return self.order.end(epoch, step)
