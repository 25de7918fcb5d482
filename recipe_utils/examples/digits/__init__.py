"""Handwritten digits, alone and in questions about pictures of numbers."""
