"""Text samples: padded and packed rows."""
