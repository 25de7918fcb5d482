"""Optimizers, gradient norms, schedules and non-finite gradients."""
