"""Memory of update steps: the budget of tokens that fits, and what did not."""
