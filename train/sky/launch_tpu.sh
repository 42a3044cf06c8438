#!/usr/bin/env bash
# Runs an experiment on a TPU through SkyPilot: launch_tpu.sh ACCELERATOR EXPERIMENT [FLAGS] [-- FLAGS OF main.py]
#   export OUTPUT_DIR=gs://BUCKET/runs
#   train/sky/launch_tpu.sh v5litepod-8 kd/deit_s_token
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=/dev/null
source "$ROOT/train/sky/find_python.sh"
cd "$ROOT"
exec "$PYTHON" -m train.sky.cluster launch "$@"
