"""Plans: which samples form which row, on which rank."""
