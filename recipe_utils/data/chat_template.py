"""Tokenizer and datasets of chat files, by the names that configs use."""

from recipe_utils.data.pairs.dataset import PairDataset as pair_dataset  # noqa: N813
from recipe_utils.data.text.datasets import ConversationDataset as conversation_dataset  # noqa: N813
from recipe_utils.data.text.datasets import TextPiecesDataset as text_pieces_dataset  # noqa: N813
from recipe_utils.data.text.tokenizer import FolderTokenizer as folder_tokenizer  # noqa: N813

__all__ = ["conversation_dataset", "folder_tokenizer", "pair_dataset", "text_pieces_dataset"]
