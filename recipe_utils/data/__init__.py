"""Loaders of datasets: checks of their first samples, order, budget of rows."""
