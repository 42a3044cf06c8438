"""Configuration: one frozen, validated `RunConfig` from YAML and flags."""

from utils.config.keys import get_neutral_keys, get_resume_rules
from utils.config.load import RunConfig, change, combine_config, dump_config, load_config

__all__ = [
    "RunConfig", "change", "combine_config", "dump_config", "get_neutral_keys", "get_resume_rules",
    "load_config",
]  # fmt: skip
