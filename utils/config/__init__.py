"""Configuration: one frozen, validated `RunConfig` from YAML and flags."""
