"""From gradients to weights."""
