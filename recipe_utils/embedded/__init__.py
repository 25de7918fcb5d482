"""The embedded defaults' texts, tokenizer and first weights: no download."""
