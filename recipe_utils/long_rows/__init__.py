"""Rows of text that several ranks compute together, because one sample is too long for one rank."""
