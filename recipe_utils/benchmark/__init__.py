"""What the recipe ``benchmark_tokens_per_second`` is made of; nothing here takes part in training."""
