"""Configuration: keys with types, defaults and checks; YAML to settings."""
