# Finds and ends what belongs to a lease, a command or a run. Sourced by the scripts beside it; hosts
# also send it as text, so that it works on devices which have no scripts yet.
#
# Every process of theirs carries a mark in the environment variable QNNFARM_MARKS: `lease:ID.GRANT.`,
# `job:TOKEN` or `run:ID`. The environment is inherited, so marks also find what left the process
# group, the session and its parents. A shell's own `export` does not show in /proc, so whoever sets
# a mark starts a new program with it.

# Prints the PID of every process that carries MARK, but not SPARED. Without -z, the grep of many a
# phone (toybox before 0.8.9) and of busybox sees no variable but the first.
marked_pids() { # MARK [SPARED]
  grep -lszF -e "$1" /proc/[0-9]*/environ 2>/dev/null |
    while IFS=/ read -r empty proc marked_pid file; do
      [ -z "${2:-}" ] || ! grep -qszF -e "$2" "/proc/$marked_pid/environ" 2>/dev/null || continue
      echo "$marked_pid"
    done
}

signal_marked() { # SIGNAL MARK
  for marked in $(marked_pids "$2"); do
    kill -s "$1" "$marked" 2>/dev/null
  done
}

# Kills what carries MARK, but not SPARED, again and again until nothing is left (a process may be
# forking). Sets killed to the number of processes found at first, and leftover to the number that
# survived, which the kernel does not let go of.
end_marked() { # MARK [SPARED]
  killed=0
  rounds=0
  while :; do
    leftover=0
    for marked in $(marked_pids "$@"); do
      kill -s KILL "$marked" 2>/dev/null
      leftover=$((leftover + 1))
    done
    [ "$rounds" -gt 0 ] || killed=$leftover
    rounds=$((rounds + 1))
    if [ "$leftover" -eq 0 ] || [ "$rounds" -ge 50 ]; then
      return 0
    fi
    sleep 0.1
  done
}
