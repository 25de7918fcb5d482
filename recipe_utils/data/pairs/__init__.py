"""Preference pairs: rows with shared prompts."""
