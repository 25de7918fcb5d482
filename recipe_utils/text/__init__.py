"""Text: conversations, trees and packed rows."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.plans.microbatching": "Microbatching",
        "recipe_utils.text.collator": "RowCollator",
        "recipe_utils.text.conversations.datasets": "conversation_dataset=ConversationDataset "
        "text_pieces_dataset=TextPiecesDataset",
        "recipe_utils.text.conversations.tokenizer": "folder_tokenizer=FolderTokenizer",
        "recipe_utils.text.datasets": "load_dataset",
        "recipe_utils.text.trees": "makes_trees",
    }
)
