"""Text: conversations, trees and packed rows."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "conversation_dataset": "recipe_utils.text.conversations.datasets:ConversationDataset",
        "folder_tokenizer": "recipe_utils.text.conversations.tokenizer:FolderTokenizer",
        "load_dataset": "recipe_utils.text.datasets",
        "makes_trees": "recipe_utils.text.trees",
        "Microbatching": "recipe_utils.plans.microbatching",
        "RowCollator": "recipe_utils.text.collator",
        "text_pieces_dataset": "recipe_utils.text.conversations.datasets:TextPiecesDataset",
    }
)
