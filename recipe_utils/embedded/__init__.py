"""Data, tokenizer and initial weights of the embedded defaults, without a download."""
