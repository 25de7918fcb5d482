"""Trainers that the benchmark compares, by framework."""
