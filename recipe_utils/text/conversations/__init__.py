"""Conversations of chat files, rendered by chat templates."""
