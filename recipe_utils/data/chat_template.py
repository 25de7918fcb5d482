"""Tokenizer and datasets of chat files, by the names that configs use."""

from recipe_utils.data.text.datasets import ConversationDataset as conversation_dataset  # noqa: N813
from recipe_utils.data.text.tokenizer import FolderTokenizer as folder_tokenizer  # noqa: N813

__all__ = ["conversation_dataset", "folder_tokenizer"]
