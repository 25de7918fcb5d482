"""Registration of the recipes with `tune`, and its launcher's signal handling."""
