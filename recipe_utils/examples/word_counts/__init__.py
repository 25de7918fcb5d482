"""Embedded default of policy gradients: answers of as many words as the question asks for."""
