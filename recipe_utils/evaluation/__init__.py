"""Evaluation while training: generation and nearest neighbors."""
