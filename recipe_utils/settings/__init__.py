"""Configuration: keys with types, defaults and checks, read from YAML."""
