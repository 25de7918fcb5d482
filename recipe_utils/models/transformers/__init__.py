"""Decoders of transformers, built from a local folder and checked at start-up."""
