#!/usr/bin/env bash
# The commands of the README, runnable on a fresh machine with Python 3.11. Without arguments: a list.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="${VENV:-$ROOT/.venv}"
DATA_DIR="${DATA_DIR:-$ROOT/data}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/runs}"
STAMP="$VENV/.requirements.sha256"

usage() {
  cat <<'TEXT'
usage: bash run_commands.sh COMMAND [ARGUMENTS]

  setup            make .venv and install requirements.txt; nothing to do if it is up to date
  demo             distil a teacher into a student on handwritten digits and show the result
  demo-seeds       the same comparison over three seeds, with mean and spread
  train CONFIG ... python main.py --config CONFIG ...
  test             the test suite
  test-all         the test suite and the long proofs

environment: VENV (.venv), DATA_DIR (data), OUTPUT_DIR (runs), PYTHON (python3.11)
TEXT
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3.11}" python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: PYTHON (${PYTHON:-python3.11}) is no Python 3.11; install python3.11 or set PYTHON" >&2
  exit 2
}

# pip reads pip.conf of the environment: whatever is installed later keeps torch and torch_xla.
pin_torch() {
  grep -E '^(torch|torchvision|torch_xla)==' "$ROOT/requirements.txt" >"$VENV/constraints.txt"
  printf '[install]\nconstraint = %s\n' "$VENV/constraints.txt" >"$VENV/pip.conf"
}

setup() {
  local wanted
  wanted="$(sha256sum "$ROOT/requirements.txt" | cut -d ' ' -f 1)"
  if [[ -f "$STAMP" && "$(cat "$STAMP")" == "$wanted" ]]; then
    return
  fi
  local python
  python="$(find_python)"
  echo "setting up $VENV (some minutes, about 8 GB)"
  "$python" -m venv "$VENV"
  pin_torch
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    -r "$ROOT/requirements.txt"
  echo "$wanted" >"$STAMP"
}

run_python() {
  (cd "$ROOT" && "$VENV/bin/python" "$@")
}

run_tests() {
  (cd "$ROOT" && PJRT_DEVICE="${PJRT_DEVICE:-CPU}" "$VENV/bin/python" -m pytest "$@")
}

main() {
  local command="${1:-}"
  shift || true
  case "$command" in
    setup) setup ;;
    demo)
      setup
      run_python tools/demo.py --data-dir "$DATA_DIR" --output-dir "$OUTPUT_DIR" "$@"
      ;;
    demo-seeds)
      setup
      run_python tools/demo.py --data-dir "$DATA_DIR" --output-dir "$OUTPUT_DIR" --seeds 0 1 2 "$@"
      ;;
    train)
      if [[ $# -lt 1 ]]; then
        echo "error: train needs a CONFIG, such as configs/digits_kd.yaml" >&2
        exit 2
      fi
      setup
      local config="$1"
      shift
      run_python main.py --config "$config" "$@"
      ;;
    test)
      setup
      run_tests -m "not slow and not cuda" "$@"
      ;;
    test-all)
      setup
      run_tests -m "not cuda" "$@"
      ;;
    "" | help | -h | --help) usage ;;
    *)
      echo "error: unknown command '$command'" >&2
      usage >&2
      exit 2
      ;;
  esac
}

main "$@"
