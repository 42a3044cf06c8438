#!/usr/bin/env bash
# Ships the committed tree to the cluster that launch_tpu.sh has started: sync_code.sh [--dirty]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=/dev/null
source "$ROOT/train/sky/find_python.sh"
cd "$ROOT"
exec "$PYTHON" -m train.sky.cluster sync "$@"
