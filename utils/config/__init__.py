"""Configuration: one frozen, validated `RunConfig` from YAML and flags."""

from utils.config.load import RunConfig, dump_config, load_config

__all__ = ["RunConfig", "dump_config", "load_config"]
