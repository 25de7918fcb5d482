from recipe_utils.plans.microbatching import MicrobatchSettings as MicrobatchSettings
from recipe_utils.text.collator import RowCollator as RowCollator
from recipe_utils.text.conversations.file_datasets import ConversationDataset as ConversationDataset
from recipe_utils.text.conversations.file_datasets import TextPiecesDataset as TextPiecesDataset
from recipe_utils.text.conversations.tokenizer import FolderTokenizer as FolderTokenizer

conversation_dataset = ConversationDataset
text_pieces_dataset = TextPiecesDataset
folder_tokenizer = FolderTokenizer
