#!/bin/sh
# Samples temperatures, clocks, battery and the memory of a run while it runs.
#   telemetry.sh once
#   telemetry.sh arm RUN_DIR PERIOD_CS
#   telemetry.sh sample RUN_DIR PERIOD_CS MAX_S PID PARENT BEGAN_S BEGAN_CS
# README.md beside this file: format, exit codes. `sample` is what run.sh starts in an armed folder.
#
# The loop forks nothing. Waiting is what a shell cannot do by itself; `read -t` on a pipe that
# nobody writes to can, and opening our own stdin for writing as well makes it a pipe that never
# ends. A shell without `read -t` hands over to one that has it.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" && . "$here/sensors.sh" || exit 125

dense_lines=6000  # at the full rate: 10 minutes at 10 Hz; then ever slower
thin_lines=3000
max_bytes=4000000
fastest_fork_cs=25 # between samples where waiting forks

wrong_use() {
  die 2 'usage: telemetry.sh once | arm RUN_DIR PERIOD_CS | sample RUN_DIR PERIOD_CS MAX_S PID PARENT BEGAN_S BEGAN_CS'
}

valid_period() { # CENTISECONDS
  valid_number "$1" && [ "${#1}" -le 5 ] && [ "$1" -ge 5 ] && [ "$1" -le 6000 ]
}

# --- sampling --------------------------------------------------------------------------------------

find_uptime() { # sets now: hundredths of a second since the run began
  read -r now_s rest </proc/uptime
  now_cs=${now_s#*.}
  now_s=${now_s%.*}
  now=$(((now_s - began_s) * 100 + ${now_cs#0} - began_cs))
}

find_cpu() { # sets cpu: what this process used, in clock ticks
  read -r stat </proc/self/stat
  # shellcheck disable=SC2086
  set -- ${stat##*) }
  cpu=$((${12} + ${13} + ${14} + ${15}))
}

# The largest process of the run: they share pages, so a sum would count some of them twice. Of a
# zombie, statm is all zeros: then the run is over.
take_memory() {
  pages=''
  read -r size pages rest <"/proc/$pid/statm"
  most=${pages:-0}
  [ "$most" != 0 ] || reason=exited
  for member in $members; do
    read -r size pages rest <"/proc/$member/statm" || continue
    [ "$pages" -le "$most" ] || most=$pages
  done
  line="$line $most"
}

take_peak() {
  most=-
  for member in $pid $members; do
    key=''
    while read -r key value rest; do
      [ "$key" != VmHWM: ] || break
    done <"/proc/$member/status"
    case $key:$value in VmHWM: | VmHWM:*[!0-9]*) continue ;; VmHWM:*) ;; *) continue ;; esac
    if [ "$most" = - ] || [ "$value" -gt "$most" ]; then most=$value; fi
  done
  line="$line / $peak_channel $most"
}

# Temperatures change slowly and there are many: four of them each time.
take_in_turn() {
  if [ -z "$pending" ]; then
    pending=$in_turn
    next_zone=$first_in_turn
  fi
  line="$line / $next_zone"
  zone_count=0
  # shellcheck disable=SC2086
  set -- $pending
  while [ $# -gt 0 ] && [ "$zone_count" -lt 4 ]; do
    value=''
    read -r value rest <"$1"
    line="$line ${value:--}"
    shift
    zone_count=$((zone_count + 1))
  done
  pending=$*
  next_zone=$((next_zone + zone_count))
}

find_members() {
  [ ! -r "$state/members" ] || read -r found <"$state/members"
  members=''
  for member in $found; do
    case $member in "$pid" | $$ | *[!0-9]*) ;; *) members="$members $member" ;; esac
  done
}

# One line for all that is read now. What a file says is handed on as it is: the host checks it.
sample_once() {
  line="s $now 0"
  for file in $every; do
    value=''
    read -r value rest <"$file"
    line="$line ${value:--}"
  done
  take_memory
  [ -z "$in_turn" ] || take_in_turn
  if [ "$now" -ge "$next_second" ]; then
    next_second=$((now + 100))
    find_members
    take_peak
  fi
  [ "${#line}" -le 1000 ] || line="s $now" # no sensor says so much
}

# On the grid of periods; what was missed is not made up for. A hundredth is the clock's step.
wait_until_due() {
  due=$((due + period))
  left=$((due - now))
  if [ "$left" -le 0 ]; then
    left=$period
    due=$((now + period))
  fi
  part=$((left % 100))
  [ "$part" -ge 10 ] || part=0$part
  if [ "$waiting" = read ]; then
    # shellcheck disable=SC3045
    read -r -t "$((left / 100)).$part" rest <&3
  else
    sleep "$((left / 100)).$part"
  fi
}

sample_loop() {
  reason=''
  trap 'reason=stopped' TERM INT
  bytes=0 lines=0 thin_at=$dense_lines
  pending='' next_second=0 members='' found=''
  find_uptime
  due=$now
  tell_battery status
  while [ -z "$reason" ]; do
    sample_once
    [ -z "$reason" ] || break
    echo "$line"
    lines=$((lines + 1))
    bytes=$((bytes + ${#line}))
    if [ "$lines" -gt "$thin_at" ]; then
      thin_at=$((thin_at + thin_lines))
      period=$((period * 2))
    fi
    wait_until_due
    find_uptime
    [ -d "/proc/$parent" ] || reason=orphaned
    [ "$now" -le "$max_cs" ] || reason=deadline
    [ "$bytes" -le "$max_bytes" ] || reason=full
  done
  tell_battery status
  find_cpu
  echo "qnnfarm-telemetry end=$reason samples=$lines cpu_ticks=$cpu elapsed_cs=$now"
}

tell_battery() { # WORD...
  for word; do
    [ -n "$battery" ] && [ -e "$battery/$word" ] || continue
    value=''
    read -r value <"$battery/$word" || [ -n "$value" ] || echo "denied $battery/$word"
    [ "${#value}" -gt 60 ] || echo "battery $word $value"
  done
}

# Everything once, with what is said of the battery in words.
tell_once() {
  line='s 0 0'
  for file in $every '' $in_turn; do
    value=''
    [ -z "$file" ] || read -r value rest <"$file"
    line="$line ${value:--}"
  done
  echo "$line"
  tell_battery capacity temp status health
  echo 'qnnfarm-telemetry end=once samples=1 cpu_ticks=0 elapsed_cs=0'
}

head_of_protocol() {
  page=$(getconf PAGESIZE 2>/dev/null)
  valid_number "$page" || page=4096
  tick=$(getconf CLK_TCK 2>/dev/null)
  valid_number "$tick" || tick=100
  echo 'format=1'
  echo "period_cs=$period"
  echo "wait=$waiting"
  echo "page_bytes=$page"
  echo "tick_hz=$tick"
}

mode=${1:-}
case $mode in
  once) [ $# -eq 1 ] || wrong_use ;;
  arm) [ $# -eq 3 ] && valid_period "$3" || wrong_use ;;
  sample)
    [ $# -eq 8 ] && valid_period "$3" || wrong_use
    for number in "$4" "$5" "$6" "$7" "$8"; do
      case $number in 0?) number=${number#0} ;; esac
      valid_number "$number" && [ "${#number}" -le 9 ] || wrong_use
    done
    [ "$4" -gt 0 ] && [ "$5" -gt 1 ] && [ "$6" -gt 1 ] || wrong_use
    ;;
  *) wrong_use ;;
esac

if [ "$mode" = arm ]; then
  cd "$2" 2>/dev/null || die 1 "no run folder $2"
  mkdir -p .qnnfarm 2>/dev/null && rm -f .qnnfarm/telemetry .qnnfarm/members &&
    echo "$3" 2>/dev/null >.qnnfarm/telemetry.period || die 1 "cannot write to $2"
  echo "qnnfarm-telemetry armed period_cs=$3"
  exit 0
fi

# A shell that knows `read -t` finds the end of an empty file; one that does not refuses the option.
# shellcheck disable=SC3045
read -r -t 0.01 rest </dev/null 2>/dev/null
knows_timeout=$?
if [ "$knows_timeout" -ne 1 ] && [ -z "${QNNFARM_TELEMETRY_SHELL:-}" ]; then
  for shell in mksh bash; do
    if command -v "$shell" >/dev/null 2>&1; then
      export QNNFARM_TELEMETRY_SHELL="$shell"
      exec "$shell" "$0" "$@"
    fi
  done
fi
waiting=fork
if [ "$knows_timeout" -eq 1 ] && [ -p /proc/self/fd/0 ] && (exec 3<>/proc/self/fd/0) 2>/dev/null; then
  exec 3<>/proc/self/fd/0
  waiting=read
fi
period=${3:-10}
if [ "$waiting" = fork ] && [ "$period" -lt "$fastest_fork_cs" ]; then period=$fastest_fork_cs; fi

if [ "$mode" = once ]; then
  exec 2>/dev/null
else
  state=$2/.qnnfarm
  case $state in /*) ;; *) state=$PWD/$state ;; esac
  max_s=$4
  [ "$max_s" -le 9000000 ] || max_s=9000000 # its hundredths must fit into 32 bits
  max_cs=$((max_s * 100 + 1000))
  pid=$5 parent=$6 began_s=$7 began_cs=${8#0}
  exec >"$state/telemetry" 2>/dev/null
fi
head_of_protocol
cd "${QNNFARM_SYS_ROOT:-/sys}" || cd /
set +f
discover
# What is read from here on is split into words, and not into the names of files.
set -f
if [ "$mode" = once ]; then
  tell_once
else
  sample_loop
fi
