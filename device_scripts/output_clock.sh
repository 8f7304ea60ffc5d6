#!/bin/sh
# Runs a command, and takes down when its output grew: the clock of programs that stream an answer
# and do not measure it.
#
# Usage: output_clock.sh CLOCK INPUT OUTPUT COMMAND [ARGUMENT...]
#
# INPUT is the command's standard input, OUTPUT gets its standard output. CLOCK gets a line at the
# start and whenever OUTPUT has grown: the uptime in seconds, with two decimals, and the bytes.
# Exits with the command's status, or with 2 for wrong use.

[ $# -ge 4 ] || { echo 'usage: output_clock.sh CLOCK INPUT OUTPUT COMMAND...' >&2; exit 2; }
clock=$1 input=$2 output=$3
shift 3

note() { # BYTES
  read -r uptime idle </proc/uptime
  echo "$uptime $1" >&3
}

exec 3>"$clock" || exit 1
: >"$output" || exit 1
note 0
"$@" <"$input" >"$output" 3>&- &
command=$!
size=0
while kill -0 "$command" 2>/dev/null; do
  now=$(stat -c %s "$output")
  if [ "$now" != "$size" ]; then
    size=$now
    note "$size"
  fi
  sleep 0.01
done
wait "$command"
status=$?
now=$(stat -c %s "$output")
[ "$now" = "$size" ] || note "$now"
exit "$status"
