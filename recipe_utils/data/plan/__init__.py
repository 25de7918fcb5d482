"""Plans: samples of an update step -> microbatches of each rank."""
