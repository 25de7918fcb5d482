"""A second model without gradients: reference and teacher."""
