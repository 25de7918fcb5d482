"""Where a training is, and what it says about itself."""
