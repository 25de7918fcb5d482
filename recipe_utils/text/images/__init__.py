"""Images beside text: opened from rows, and made into what a model takes beside tokens."""
