# Shared by the scripts beside it: sourced, never run, with their folder in $here.
#
# Floor: Android's mksh and toybox. Two things follow that are easy to forget: mksh's arithmetic is
# 32-bit (so sizes are compared as strings, and times as seconds and hundredths), and each external
# command is a fork (so what runs in a loop uses builtins).

LC_ALL=C
export LC_ALL
. "$here/marked.sh" || exit 125
. "$here/sha256.sh" || exit 125

die() { # STATUS MESSAGE
  printf 'error: %s\n' "$2" >&2
  exit "$1"
}

cannot_write() { # PATH [STATUS]; the harness knows a full device by these words
  die "${2:-1}" "cannot write to $1: the file system is full or read-only"
}

# One path component, plain ASCII, not hidden: safe in any command line.
valid_run_id() { # ID
  case $1 in
    '' | .* | -* | *[!A-Za-z0-9._-]*) return 1 ;;
  esac
  [ "${#1}" -le 128 ]
}

valid_sha256() { # TEXT
  case $1 in
    '' | *[!0-9a-f]*) return 1 ;;
  esac
  [ "${#1}" -eq 64 ]
}

valid_number() { # TEXT
  case $1 in
    '' | *[!0-9]*) return 1 ;;
  esac
}

# Sets start_time: when process PID began, in clock ticks since boot; empty when it is gone or a
# zombie. PID and start time together name a process for good, a PID alone may be used again. The
# command's name is in the same line and may hold anything, so what follows its last parenthesis is
# read.
find_start_time() { # PID
  start_time=$(cat "/proc/$1/stat" 2>/dev/null) || { start_time=''; return 0; }
  set -f
  # shellcheck disable=SC2086
  set -- ${start_time##*) }
  set +f
  start_time=${20:-}
  case ${1:-} in Z | X) start_time='' ;; esac
}

# Runs a function while no other script does so, in the work root. The kernel lets go of the lock
# when its holder dies.
locked() { # FUNCTION [ARGUMENT...]
  { flock 9 && "$@"; } 9>store/.lock
}

# Removes what deployments left in incoming/ and nothing was written to for so long. Files have the
# time of the host that pushed them: those of the future are given ours, or they would stay for ever.
clean_incoming() { # MINUTES
  touch store/.lock 2>/dev/null && find incoming -type f -newer store/.lock -exec touch -c {} + 2>/dev/null
  find incoming -mindepth 1 -maxdepth 1 ! -type d -mmin "+$1" -exec rm -f {} + 2>/dev/null
  for left in incoming/*; do
    [ -d "$left" ] && [ ! -L "$left" ] || continue
    fresh=$(find "$left" -type f -mmin "-$1" 2>/dev/null) && [ -z "$fresh" ] && rm -rf "$left"
  done
}

# Sets free_kb: what may still be written in a folder; empty where df does not tell. In this order
# the options mean KiB to every df (to toybox before 0.8.6, `-kP` means half of one).
find_free() { # FOLDER
  free_kb=$(df -Pk "$1" 2>/dev/null | while read -r device size used available rest; do
    valid_number "$available" && echo "$available"
  done)
}
