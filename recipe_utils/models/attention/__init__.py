"""Attention within the documents of packed rows."""
