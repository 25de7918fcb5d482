"""Memory of update steps: the largest budget of tokens that fits, and out-of-memory errors."""
