"""The embedded default's text, tokenizer and first weights: no download."""
