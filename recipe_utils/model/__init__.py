"""Models: building, wrapping, sharding and loading, pipeline stages and adapters."""
