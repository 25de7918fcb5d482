"""Images: decoding, multi-crop augmentation, token rows."""
