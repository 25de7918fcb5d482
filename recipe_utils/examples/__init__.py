"""Data, tokenizer and initial weights of the embedded defaults, without a download."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.examples.digits": "digits_dataset",
        "recipe_utils.examples.fresh_weights": "fresh_llama_checkpointer",
        "recipe_utils.examples.stdlib_code": "code_dataset",
        "recipe_utils.examples.stdlib_conversations": "conversation_dataset conversation_tokenizer",
        "recipe_utils.examples.stdlib_docs": "docstring_dataset docstring_tokenizer",
        "recipe_utils.examples.stdlib_preferences": "word_order_dataset",
        "recipe_utils.examples.word_counts.questions": "word_count_reward",
        "recipe_utils.examples.word_counts.warm_start": "word_count_checkpointer",
    }
)
