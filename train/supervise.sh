#!/usr/bin/env bash
# Runs `python main.py ARGUMENTS --resume auto` until it is complete: at once after a preemption (exit
# code 75), with back-off if one comes soon after the start, and, with back-off and a limit, after a
# crash. Reports why it stopped.
#
#   bash train/supervise.sh --config configs/x.yaml --run.run_id=first
#
# environment:
#   SUPERVISE_CRASHES (5)      crashes and soon preemptions in a row to bear, without a new
#                              checkpoint between them
#   SUPERVISE_BACKOFF_S (10)   pause after the first of them; doubled by each further one, up to 600
#   SUPERVISE_SOON_S (300)     a preemption within this time of the start is a soon one
#   PYTHON (python)            the interpreter
set -uo pipefail

readonly EXIT_USER_ERROR=2 EXIT_PREEMPTED=75
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python}"
limit="${SUPERVISE_CRASHES:-5}"
backoff_s="${SUPERVISE_BACKOFF_S:-10}"
soon_s="${SUPERVISE_SOON_S:-300}"
child=""
asked=""

say() {
  echo "supervise: $*" >&2
}

forward() {
  asked="$1"
  # SIGTERM for both: a shell starts its background programs with SIGINT ignored.
  [[ -n "$child" ]] && kill -TERM "$child" 2>/dev/null
}

# Waits for the child however many signals arrive meanwhile; gives its exit code.
await() {
  local code last
  while true; do
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  # A signal may have ended that wait, and the child since; 127: there is nothing more to wait for.
  wait "$child" 2>/dev/null
  last=$?
  [[ "$last" -eq 127 ]] || code=$last
  return "$code"
}

# Steps that are saved: a run that gets on may crash again without using up the limit.
count_progress() {
  grep -oE '[^ ]+ saved and read back' "$log" | tail -n 1
}

if [[ $# -eq 0 ]]; then
  say "give the arguments of main.py, such as --config configs/x.yaml --run.run_id=first"
  exit "$EXIT_USER_ERROR"
fi
arguments=("$@")
if [[ " $* " != *" --run.run_id"* ]]; then
  # Without a name `--resume auto` would continue the newest run of the directory.
  name="supervised-$(date +%Y%m%d-%H%M%S)-$$"
  arguments+=("--run.run_id=$name")
  say "the run's name is $name"
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
log="$folder/log" pipe="$folder/pipe"
mkfifo "$pipe"
trap 'forward TERM' TERM
trap 'forward INT' INT

crashes=0 # and soon preemptions, since the last new checkpoint
pauses=0  # in a row
progress=""
cd "$root" || exit 1
while true; do
  began_s=$SECONDS what="crashed"
  tee -i "$log" <"$pipe" >&2 &
  reader=$!
  # In a session of its own, a terminal's Ctrl-C reaches it once, by way of this script.
  setsid "$python" main.py "${arguments[@]}" --resume auto 2>"$pipe" &
  child=$!
  await
  code=$?
  child=""
  while kill -0 "$reader" 2>/dev/null; do wait "$reader"; done
  if [[ "$code" -eq 0 ]]; then
    say "stopped: the run is complete"
    exit 0
  elif [[ -n "$asked" ]]; then
    say "stopped: asked to by SIG$asked (exit code $code)"
    exit "$code"
  elif [[ "$code" -eq "$EXIT_USER_ERROR" ]]; then
    say "stopped: the run refused its configuration (exit code 2), which another try cannot mend"
    exit "$code"
  elif [[ "$code" -eq "$EXIT_PREEMPTED" ]]; then
    what="preempted"
    if ((SECONDS - began_s >= soon_s)); then
      crashes=0 pauses=0
      say "preempted (exit code 75): going on at once"
      continue
    fi
  fi
  now="$(count_progress)"
  if [[ -n "$now" && "$now" != "$progress" ]]; then
    crashes=0
    # A machine that lets a start save and nothing more is given longer and longer.
    [[ "$what" == crashed ]] && pauses=0
  fi
  progress="${now:-$progress}"
  crashes=$((crashes + 1)) pauses=$((pauses + 1))
  if [[ "$crashes" -gt "$limit" ]]; then
    say "stopped: $what, $crashes in a row without a new checkpoint, the last with exit code $code"
    exit "$code"
  fi
  pause=$((backoff_s * (1 << (pauses < 10 ? pauses - 1 : 9))))
  [[ "$pause" -gt 600 ]] && pause=600
  say "$what (exit code $code), $crashes of $limit in a row: again in $pause s"
  sleep "$pause" &
  child=$!
  await
  child=""
  if [[ -n "$asked" ]]; then
    say "stopped: asked to by SIG$asked"
    exit "$code"
  fi
done
