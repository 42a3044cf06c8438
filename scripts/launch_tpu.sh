#!/usr/bin/env bash
# Runs an experiment on a TPU through SkyPilot: launch_tpu.sh ACCELERATOR EXPERIMENT [FLAGS] [-- FLAGS OF main.py]
#   export OUTPUT_DIR=gs://BUCKET/runs
#   scripts/launch_tpu.sh v5litepod-8 kd/deit_s_token
# The same as train/sky/launch_tpu.sh, under the name that people know.
exec bash "$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/train/sky/launch_tpu.sh" "$@"
