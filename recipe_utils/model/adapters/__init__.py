"""LoRA, DoRA, QLoRA and QAT."""
