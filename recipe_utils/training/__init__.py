"""A training: loop, log, checkpoints."""
