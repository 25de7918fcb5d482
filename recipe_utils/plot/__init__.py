"""Plots of metrics."""
