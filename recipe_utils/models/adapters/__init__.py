"""LoRA, DoRA, NF4 and fake-quantized weights."""
