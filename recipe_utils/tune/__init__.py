"""What `tune` is told about this project's recipes, and how its launcher waits for their ranks."""
