"""Parts of a training."""
