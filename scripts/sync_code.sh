#!/usr/bin/env bash
# Ships the committed tree to the cluster that launch_tpu.sh has started: sync_code.sh [--dirty]
# The same as train/sky/sync_code.sh, under the name that people know.
exec bash "$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/train/sky/sync_code.sh" "$@"
