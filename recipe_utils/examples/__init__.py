"""Data, tokenizer and initial weights of the embedded defaults, without a download."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "code_dataset": "recipe_utils.examples.stdlib_code",
        "conversation_dataset": "recipe_utils.examples.stdlib_conversations",
        "conversation_tokenizer": "recipe_utils.examples.stdlib_conversations",
        "digits_dataset": "recipe_utils.examples.digits",
        "docstring_dataset": "recipe_utils.examples.stdlib_docs",
        "docstring_tokenizer": "recipe_utils.examples.stdlib_docs",
        "fresh_llama_checkpointer": "recipe_utils.examples.fresh_weights",
        "word_order_dataset": "recipe_utils.examples.stdlib_preferences",
    }
)
