"""Building, sharding and loading a model."""
