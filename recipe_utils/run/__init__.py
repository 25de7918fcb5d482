"""State and output of a training run: entry point, position, log, checkpoints and exports."""
