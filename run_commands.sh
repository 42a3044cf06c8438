#!/usr/bin/env bash
# The commands of the README, for a fresh machine with Python 3.11 to 3.13. Without arguments: a list.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="${VENV:-$ROOT/.venv}"
DATA_DIR="${DATA_DIR:-$ROOT/data}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/runs}"
REQUIREMENTS="$ROOT/requirements.txt"
# Where torch_tpu is installed, importing torch would open libtpu.
export TORCH_DEVICE_BACKEND_AUTOLOAD="${TORCH_DEVICE_BACKEND_AUTOLOAD:-0}"

usage() {
  cat <<'TEXT'
usage: bash run_commands.sh COMMAND [ARGUMENTS]

  setup            make .venv and install requirements.txt; nothing to do if it is up to date
  setup --tpu      the same with libtpu, on a TPU VM
  setup --tpu-compiler  the same with the TPU compiler, for tools that need no TPU
                        --newest: make .venv-compiler, with today's TPU compiler
  setup --jax-export    the same with what makes StableHLO that takes any number of images
  setup --dev      the same with tests, linters and notebooks, to change the project
  setup --torch-tpu     make .venv-tpu, with TorchTPU instead of torch_xla
  doctor           is this machine fit? --data-dir DIR, --output URL, --tpu NAME for a whole pod
  smoke            20 training steps of batch 8 on whatever device is here
  demo             distil a teacher into a student on handwritten digits and show the result
  demo-seeds       the same comparison over three seeds, with mean and spread
  train CONFIG ... python main.py --config CONFIG ...
  supervise ...    python main.py ..., started again after preemptions and crashes
  service ...      the dashboard of all runs in a browser: prints its address (--port, --store)
  pod TPU -- CMD   CMD on every worker of a TPU VM or pod slice
  mirrors ...      make .venv-mirrors, and send runs from it: --to mlflow|wandb|trackio RUN
  export WEIGHTS   a model in another form: --to onnx|stablehlo|savedmodel|torch_export|timm --out FOLDER
  test             the test suite, after setup --dev
  test --torch-tpu      a core of it on TorchTPU's torch, on its stand-in on the CPU; or paths
  docs             these documents as a site in .site/html, with the reference; --serve PORT shows it,
                   --releases adds each released version
  test-all         the test suite and the long proofs, the TPU compiler's among them
  proofs K/N       the long proofs alone, part K of N
  lint             form, types, words and structure of the source, and the workflows
  wheel            build the wheel and the source archive into dist/
  baseline         measure two small runs for the store's benchmarks; fails if they are worse
  release ...      check, notes, fixture or bump of a release

environment: VENV (.venv), DATA_DIR (data), OUTPUT_DIR (runs), PYTHON (python3.11), ZONE, PROJECT
TEXT
}

# torch_xla's wheels and the pins of requirements.txt are there for 3.11 to this one; the libtpu that
# torch_xla names is not there for 3.13.
newest_python=13

is_fitting_python() {
  "$1" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $newest_python))" &>/dev/null
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3.11}" python3.12 python3.13 python3; do
    if is_fitting_python "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "error: PYTHON (${PYTHON:-python3.11}) is no Python 3.11 to 3.$newest_python; install one or set PYTHON" >&2
  exit 2
}

# The images of TPU VMs have another Python; Ubuntu's packages bring this one.
install_python() {
  if command -v "${PYTHON:-python3.11}" >/dev/null || ! command -v apt-get >/dev/null; then
    return
  fi
  if [[ -z "${PYTHON:-}" ]] && (find_python) >/dev/null 2>&1; then
    return
  fi
  echo "installing python3.11"
  # A machine that has just booted updates itself and holds the lock for minutes.
  sudo apt-get -qq -o DPkg::Lock::Timeout=600 update
  sudo apt-get -qq -o DPkg::Lock::Timeout=600 install --yes python3.11 python3.11-venv
}

run_pip() {
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

hash_lists() {
  cat "$@" | sha256sum | cut -d ' ' -f 1
}

# is_stamped STAMP LIST ...: whether these lists of requirements have been installed.
is_stamped() {
  [[ -f "$1" && "$(cat "$1")" == "$(hash_lists "${@:2}")" ]]
}

# install_lists STAMP SIZE LIST ...: an environment of these lists of requirements at VENV.
install_lists() {
  local stamp="$VENV/$1" size="$2" list lists=() python
  shift 2
  if is_stamped "$stamp" "$@"; then
    return
  fi
  python="$(find_python)"
  echo "setting up $VENV ($size)"
  "$python" -m venv "$VENV"
  # Which stack the environment is for, even if the installation does not end.
  : >"$stamp"
  # pip reads pip.conf of the environment: whatever is installed later keeps torch and torch_xla.
  grep -hE '^(torch|torchvision|torch_xla)==' "$@" >"$VENV/constraints.txt" || true
  printf '[install]\nconstraint = %s\n' "$VENV/constraints.txt" >"$VENV/pip.conf"
  for list in "$@"; do lists+=(-r "$list"); done
  run_pip "${lists[@]}"
  hash_lists "$@" >"$stamp"
}

is_torch_tpu() {
  [[ -f "$VENV/.torch-tpu.sha256" ]]
}

setup() {
  if is_torch_tpu; then
    setup_torch_tpu
  else
    install_lists .requirements.sha256 "some minutes, about 10 GB" "$REQUIREMENTS"
  fi
}

# TorchTPU and torch_xla need different releases of torch: an environment of its own at VENV.
setup_torch_tpu() {
  mkdir -p "$VENV"
  grep -vE '^(torch|torchvision|torch_xla)==' "$REQUIREMENTS" >"$VENV/requirements.txt"
  install_lists .torch-tpu.sha256 "some minutes, about 9 GB" \
    "$VENV/requirements.txt" "$ROOT/requirements-torch-tpu.txt"
}

need_torch_xla() {
  if is_torch_tpu; then
    echo "error: setup --$1 needs torch_xla, but VENV ($VENV) has TorchTPU; set VENV to another" >&2
    exit 2
  fi
}

# torch_xla's own extras name the versions of libtpu and jax that fit it.
setup_extra() {
  local name="$1" extras="$2" stamp="$VENV/.extra-$1" xla
  need_torch_xla "$name"
  newest_python=12
  setup
  if is_stamped "$stamp" "$REQUIREMENTS"; then
    return
  fi
  if ! is_fitting_python "$VENV/bin/python"; then
    echo "error: setup --$name needs Python 3.11 or 3.12, but VENV ($VENV) has another; set VENV to another" >&2
    exit 2
  fi
  xla="$(grep -E '^torch_xla==' "$REQUIREMENTS")"
  echo "adding what $name needs"
  run_pip "${xla/torch_xla/torch_xla[$extras]}"
  hash_lists "$REQUIREMENTS" >"$stamp"
}

# What one part needs beside the trainer, which needs none of it: service, export, jax-export, dev.
setup_part() {
  local name="$1" list="$ROOT/requirements-$1.txt" stamp="$VENV/.extra-$1"
  setup
  if is_stamped "$stamp" "$REQUIREMENTS" "$list"; then
    return
  fi
  echo "adding what the $name needs"
  run_pip -r "$list"
  hash_lists "$REQUIREMENTS" "$list" >"$stamp"
}

setup_suite() {
  setup_part dev
  setup_part service
  setup_part export
}

setup_all() {
  setup_extra tpu-compiler tpu,pallas
  setup_suite
  setup_part jax-export
  setup_part delta
}

# The core: what another torch is most likely to break, and the device itself. Left out of these rooms
# is what computes nothing with torch (configuration, storage, programs, signals): the suite on torch
# 2.9 proves it as well.
TORCH_TPU_TESTS=(
  tests/test_engine.py tests/test_optim_factory.py tests/test_optimizers.py
  tests/test_compile_backends.py tests/test_resumed_runs.py tests/test_parity.py
  tests/test_parity_tasks.py
  tests/losses tests/models tests/utils tests/device
  --ignore=tests/utils/test_{config,layers,storage,error_codes,programs,stopping}.py
)

run_torch_tpu_tests() {
  is_torch_tpu || local VENV="$VENV-tpu"
  setup_torch_tpu
  setup_suite
  if [[ $# -eq 0 ]]; then
    set -- -n 2 --dist loadfile "${TORCH_TPU_TESTS[@]}"
  fi
  run_suite "not slow and not cuda" "$@"
}

run_service() {
  setup_part service
  if [[ "$OUTPUT_DIR" != *://* ]]; then mkdir -p "$OUTPUT_DIR"; fi
  cd "$ROOT"
  # In the place of this shell, so that Ctrl-C and signals reach it.
  exec "$VENV/bin/python" -m tools.serve --store "$OUTPUT_DIR" "$@"
}

run_setup() {
  case "${1:-}" in
    "") setup ;;
    --tpu)
      newest_python=12
      install_python
      setup_extra tpu tpu
      ;;
    --tpu-compiler)
      if [[ "${2:-}" == --newest ]]; then setup_newest_compiler; else setup_extra tpu-compiler tpu,pallas; fi
      ;;
    --jax-export)
      need_torch_xla jax-export
      setup_part jax-export
      ;;
    --dev) setup_suite ;;
    --torch-tpu)
      install_python
      is_torch_tpu || VENV="$VENV-tpu"
      setup_torch_tpu
      ;;
    *)
      echo "error: setup knows --tpu, --tpu-compiler, --jax-export, --dev and --torch-tpu, not '$1'" >&2
      exit 2
      ;;
  esac
}

run_python() {
  (cd "$ROOT" && "$VENV/bin/python" "$@")
}

# The suite: two workers, each with whole files, so that what a file shares is made once. Each test
# has a time limit (pyproject.toml); the limit here ends a run whose processes do not.
run_suite() {
  local marks="$1" limit=75m tree
  shift
  if [[ $# -gt 0 ]]; then
    run_tests -m "$marks" "$@"
    return
  fi
  tree="$(find_tree)"
  run_tests -m "$marks" -n 2 --dist loadfile || return
  # A release is checked against what has passed whole.
  if [[ -n "$tree" && "$(find_tree)" == "$tree" ]]; then echo "$tree" >"$VENV/.suite-tree"; fi
}

# The tree of the commit that is checked out; nothing if files differ from it.
find_tree() {
  if [[ -z "$(git -C "$ROOT" status --porcelain 2>&1)" ]]; then
    git -C "$ROOT" rev-parse 'HEAD^{tree}'
  fi
}

# The long proofs, one file at a time and each in a process of its own: some of them measure or take
# all cores, and XLA on the CPU maps the code of each program for good, of which a process has room
# for some ten thousands (vm.max_map_count).
run_proofs() {
  local part="${1%/*}" parts="${1#*/}" files file code=0
  mapfile -t files < <(cd "$ROOT" && grep -rl --include='test_*.py' 'mark\.slow' tests | sort |
    awk -v part="$part" -v parts="$parts" 'NR % parts == part % parts')
  for file in "${files[@]}"; do
    echo "long proofs: $file"
    # 5: all of them are for a GPU.
    run_tests -q -m "slow and not cuda" "$file" -o faulthandler_timeout=7200 ||
      [[ $? -eq 5 ]] || code=1
  done
  return "$code"
}

run_all_tests() {
  local code=0
  run_suite "not slow and not cuda" || code=1
  run_proofs 1/1 || code=1
  return "$code"
}

# Ruff and the type checker are tests of test_style.py.
run_lint() {
  run_tests -q -n0 tests/test_style.py tests/test_floors.py tests/proofs/test_words.py \
    tests/test_community.py
}

# What a night keeps of each commit: `runs trend` ends with 1 if the newest reports are worse.
run_baseline() {
  local blocks=(--steps 5 --repeats 5 --store "$OUTPUT_DIR" --runtime.device=cpu)
  if [[ ! -d "$DATA_DIR/digits" ]]; then
    run_python -m tools.prepare_dataset digits --out "$DATA_DIR"
  fi
  mkdir -p "$OUTPUT_DIR"
  run_python -m tools.benchmark --config configs/smoke.yaml --input synthetic "${blocks[@]}"
  run_python -m tools.benchmark --config configs/digits_student.yaml --data.root="$DATA_DIR" \
    "${blocks[@]}"
  run_python -m tools.runs trend --store "$OUTPUT_DIR" --html "$OUTPUT_DIR/trends.html"
}

# Pytest, ended after `limit` of the caller; without one it may take as long as it wants.
run_tests() {
  (cd "$ROOT" && PJRT_DEVICE="${PJRT_DEVICE:-CPU}" timeout --foreground --kill-after=60 "${limit:-0}" \
    "$VENV/bin/python" -m pytest "$@")
}

# The doctor looks at a machine as it is: it works before setup, with any Python 3.
run_doctor() {
  local python="$VENV/bin/python"
  if [[ ! -x "$python" ]]; then
    python="$(command -v "${PYTHON:-python3.11}" || command -v python3)"
  fi
  (cd "$ROOT" && "$python" -m tools.doctor "$@")
}

run_train() {
  if [[ $# -lt 1 ]]; then
    echo "error: train needs a CONFIG, such as configs/digits_kd.yaml" >&2
    exit 2
  fi
  setup
  run_python main.py --config "$@"
}

# Today's TPU compiler: an environment of its own, because torch_xla wants an older one.
setup_newest_compiler() {
  local VENV="${VENV%-tpu}-compiler"
  install_lists .requirements.sha256 "a minute, about 1 GB" "$ROOT/requirements-compiler.txt"
}

# Other trackers' clients: an environment of its own, apart from the trainer's.
run_mirrors() {
  local VENV="$VENV-mirrors"
  install_lists .requirements.sha256 "a minute, about 1 GB" "$ROOT/requirements-mirrors.txt"
  if [[ $# -gt 0 ]]; then
    run_python -m tools.mirror "$@"
  fi
}

run_pod() {
  if [[ $# -lt 3 || "$2" != -- ]]; then
    echo "error: pod needs a TPU and a command: pod TPU -- python main.py --config ..." >&2
    exit 2
  fi
  local tpu="$1"
  shift 2
  run_launcher --tpu="$tpu" --venv=.venv -- "$@"
}

# The launcher itself needs no environment but Python 3.11 or later.
run_launcher() {
  local python="$VENV/bin/python" place=()
  if [[ ! -x "$python" ]]; then
    python="$(find_python)"
  fi
  if [[ -n "${ZONE:-}" ]]; then place+=("--zone=$ZONE"); fi
  if [[ -n "${PROJECT:-}" ]]; then place+=("--project=$PROJECT"); fi
  (cd "$ROOT" && "$python" -m train.xla_dist "${place[@]}" "$@")
}

main() {
  local command="${1:-}"
  shift || true
  case "$command" in
    setup) run_setup "$@" ;;
    doctor) run_doctor "$@" ;;
    smoke)
      setup
      run_python main.py --config configs/smoke.yaml --run.output_dir "$OUTPUT_DIR" \
        --run.run_id smoke --run.overwrite true "$@"
      ;;
    demo)
      setup
      run_python -m tools.demo --data-dir "$DATA_DIR" --output-dir "$OUTPUT_DIR" "$@"
      ;;
    demo-seeds)
      setup
      run_python -m tools.demo --data-dir "$DATA_DIR" --output-dir "$OUTPUT_DIR" --seeds 0 1 2 "$@"
      ;;
    train) run_train "$@" ;;
    supervise)
      setup
      PYTHON="$VENV/bin/python" exec bash "$ROOT/train/supervise.sh" "$@"
      ;;
    service) run_service "$@" ;;
    pod) run_pod "$@" ;;
    mirrors) run_mirrors "$@" ;;
    export)
      setup_part export
      run_python -m tools.export "$@"
      ;;
    docs)
      setup_part dev
      run_python -m proofs.docs_site "$@"
      ;;
    test)
      if [[ "${1:-}" == --torch-tpu ]]; then
        run_torch_tpu_tests "${@:2}"
        return
      fi
      setup_suite
      run_suite "not slow and not cuda" "$@"
      ;;
    proofs)
      if [[ ! "${1:-}" =~ ^[1-9][0-9]*/[1-9][0-9]*$ || "${1%/*}" -gt "${1#*/}" ]]; then
        echo "error: proofs needs a part such as 1/6, not '${1:-}'" >&2
        exit 2
      fi
      setup_all
      run_proofs "$1"
      ;;
    lint)
      setup_suite
      run_lint
      ;;
    wheel)
      setup_part dev
      run_python -m hatchling build -d dist
      ;;
    baseline)
      setup
      run_baseline
      ;;
    release)
      setup_suite
      run_python -m proofs.release "$@"
      ;;
    test-all)
      setup_all
      if [[ $# -eq 0 ]]; then run_all_tests; else run_tests -m "not cuda" "$@"; fi
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
