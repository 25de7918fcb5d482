"""Memory and FLOPs of update steps, computed with tensors that have shapes and no numbers."""
