"""Preference pairs and their collator."""
