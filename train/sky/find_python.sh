#!/usr/bin/env bash
# Sourced: sets PYTHON, if it is not set, to the first Python here that has PyYAML: this tree's, SkyPilot's, the machine's.
set -euo pipefail
if [[ -z "${PYTHON:-}" ]]; then
  sky="$(command -v sky || true)"
  interpreter="$([[ -z "$sky" ]] || sed -n '1s/^#! *//p' "$sky")"
  for candidate in "${VENV:-$ROOT/.venv}/bin/python" "$ROOT/.venv-tpu/bin/python" "$interpreter" python3; do
    if "$candidate" -c 'import sys, yaml; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      PYTHON="$candidate"
      break
    fi
  done
fi
if [[ -z "${PYTHON:-}" ]]; then
  echo "error: no Python 3.10 with PyYAML is here; run bash run_commands.sh setup, or set PYTHON to one" >&2
  exit 2
fi
