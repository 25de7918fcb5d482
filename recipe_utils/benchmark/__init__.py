"""Parts of the recipe ``benchmark_tokens_per_second``, not used by training."""
