#!/bin/sh
# Runs one command in a run folder, under a time limit, and leaves nothing of it behind.
#   run.sh [-o STDOUT_FILE] [-m MAX_LOG_MIB] [-t TELL_S] RUN_DIR TIMEOUT_S LOG -- COMMAND [ARGUMENT...]
# README.md beside this file: environment, last line of the output, exit codes.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125
case $here in /*) ;; *) here=$PWD/$here ;; esac

grace_ticks=15 # of 0.2 s, between TERM and KILL
out=''
max_log_mib=64
tell_s=10
while [ $# -gt 0 ]; do
  case $1 in
    -o) [ $# -ge 2 ] && out=$2 || die 125 '-o needs a file'; shift 2 ;;
    -m) valid_number "${2:-}" && [ "${#2}" -le 6 ] && max_log_mib=$2 || die 125 '-m needs a number of MiB'; shift 2 ;;
    -t) valid_number "${2:-}" && [ "${#2}" -le 6 ] && tell_s=$2 || die 125 '-t needs seconds'; shift 2 ;;
    *) break ;;
  esac
done
if [ $# -lt 5 ] || [ "$4" != -- ]; then
  die 125 'usage: run.sh [-o STDOUT_FILE] [-m MAX_LOG_MIB] [-t TELL_S] RUN_DIR TIMEOUT_S LOG -- COMMAND [ARGUMENT...]'
fi
valid_number "$2" && [ "$2" -gt 0 ] && [ "${#2}" -le 7 ] || die 125 "the timeout must be whole seconds, 1 to 9999999: $2"
timeout_s=$2
log=$3
cd "$1" 2>/dev/null || die 125 "no run folder $1"
run_dir=$(pwd -P)
shift 4

mkdir -p .qnnfarm 2>/dev/null || cannot_write "$run_dir" 125
# Through a link to the store, the log would take the place of a content.
[ ! -L "$log" ] && [ ! -L "$out" ] || die 125 "the log or output has the name of a file of the run: $log $out"
(: >"$log") 2>/dev/null || cannot_write "the log $log" 125
if [ -z "$out" ]; then
  out=$log
else
  (: >"$out") 2>/dev/null || cannot_write "$out" 125
fi

# The marker is unlike that of any other run, on this device and on others which may share the
# kernel; it stays the same for all runs in this folder.
if (set -C; : >.qnnfarm/marker) 2>/dev/null && ! cat /proc/sys/kernel/random/uuid >.qnnfarm/marker; then
  rm -f .qnnfarm/marker # an empty one would stay in the way of every later run
fi 2>/dev/null
read -r marker 2>/dev/null <.qnnfarm/marker || cannot_write "$run_dir" 125

# Hundredths matter (a small model's run takes a second) and the clock may be set: uptime.
find_uptime() { # sets now_s and now_cs
  read -r now_s rest </proc/uptime
  now_cs=${now_s#*.}
  now_s=${now_s%.*}
  now_cs=${now_cs#0}
}

# Sets alive to 1 while PID is our child and no zombie, and raises peak_kb to its VmHWM.
sample() { # PID
  alive=0
  {
    while read -r key value rest; do
      case $key in
        State:) case $value in Z* | X*) return 0 ;; esac ;;
        PPid:) [ "$1" != "$pid" ] || [ "$value" = $$ ] || return 0 ;;
        VmHWM:)
          [ "$value" -le "$peak_kb" ] || peak_kb=$value
          break
          ;;
      esac
    done <"/proc/$1/status" && alive=1
  } 2>/dev/null
}

# Raises anon_kb to the anonymous memory of PID, swapped or not, and file_kb to its pages of mapped
# files and shared memory. The kernel walks all its pages for this, so not at every tick.
sample_memory() { # PID
  rss=0 anonymous=0 swap=0
  {
    while read -r key value rest; do
      case $key in
        Rss:) rss=$value ;;
        Anonymous:) anonymous=$value ;;
        Swap:)
          swap=$value
          break
          ;;
      esac
    done <"/proc/$1/smaps_rollup"
  } 2>/dev/null
  [ $((anonymous + swap)) -le "$anon_kb" ] || anon_kb=$((anonymous + swap))
  [ $((rss - anonymous)) -le "$file_kb" ] || file_kb=$((rss - anonymous))
}

signal_run() { # SIGNAL
  kill -s "$1" "$pid" 2>/dev/null # it has no mark yet while the shell forks it
  signal_marked "$1" "run:$marker"
}

# Ends the run the kind way, then the other way.
stop_run() {
  signal_run TERM
  ticks=0
  while [ "$ticks" -lt "$grace_ticks" ] && [ -n "$(marked_pids "run:$marker")" ]; do
    sample "$pid"
    sleep 0.2
    ticks=$((ticks + 1))
  done
  signal_run KILL
}

# In a folder that telemetry.sh has armed, it samples this run, in the same clock.
start_sampler() {
  period=''
  [ ! -f .qnnfarm/telemetry.period ] || read -r period <.qnnfarm/telemetry.period
  valid_number "$period" || return 0
  : | QNNFARM_MARKS=$marks sh "$here/telemetry.sh" \
    sample "$run_dir" "$period" "$timeout_s" "$pid" $$ "$began_s" "$began_cs" >/dev/null 2>&1 &
  sampler=$!
}

# It ends by itself when the command does; the wait, of seconds where the device is busy with other
# things, is for its last line.
end_sampler() {
  [ -n "$sampler" ] || return 0
  kill -s TERM "$sampler" 2>/dev/null
  ticks=0
  peak_of_run=$peak_kb
  while [ "$ticks" -lt 250 ]; do
    sample "$sampler"
    [ "$alive" -eq 1 ] || break
    sleep 0.02
    ticks=$((ticks + 1))
  done
  peak_kb=$peak_of_run
}

# Says that the command still runs, and how far it is if it tells; less and less often.
tell_progress() {
  words=''
  { read -r words <.qnnfarm/progress; } 2>/dev/null
  echo "qnnfarm-running elapsed_s=$passed $words"
  tell_s=$((passed + (passed < 60 ? passed : 60)))
}

interrupt() { # SIGNAL
  trap '' HUP INT TERM
  reason=$1
  stop_run
  finish
}

# Whatever happened, no process of the run outlives this.
finish() {
  trap '' HUP INT TERM
  find_uptime
  end_sampler
  end_marked "run:$marker"
  status=137
  sample "$pid"
  if [ "$alive" -eq 0 ]; then
    wait "$pid" 2>/dev/null
    status=$?
  fi
  signal=0
  if [ "$status" -gt 128 ] && [ "$status" -le 192 ]; then
    signal=$((status - 128))
  fi
  rm -f .qnnfarm/process .qnnfarm/progress
  timed_out=0
  [ "$reason" != timeout ] || timed_out=1
  elapsed_ms=$(((now_s - began_s) * 1000 + (now_cs - began_cs) * 10))
  # Seen once, or last long before its end, it may have been the shell that it began as.
  if [ "$seen" -lt 2 ] || [ "$seen_ms" -lt $((elapsed_ms / 3)) ]; then
    peak_kb=0 anon_kb=0 file_kb=0
  fi
  result="qnnfarm-run exit=$status signal=$signal timed_out=$timed_out peak_rss_kb=$peak_kb"
  result="$result peak_anon_kb=$anon_kb peak_file_kb=$file_kb"
  result="$result elapsed_ms=$elapsed_ms reason=$reason leftover=$leftover"
  echo "$result" >.qnnfarm/result
  echo "$result"
  case $reason in
    exited) exit "$status" ;;
    timeout) exit 124 ;;
    log-too-big) exit 123 ;;
    *) exit 129 ;;
  esac
}

pid=''
sampler=''
peak_kb=0
anon_kb=0
file_kb=0
seen=0 # how often the command was found alive, and how long after its begin the last time
seen_ms=0
reason=exited
leftover=0
launch=''
! command -v setsid >/dev/null 2>&1 || launch=setsid
find_uptime
began_s=$now_s
began_cs=$now_cs
trap 'early=HUP' HUP
trap 'early=INT' INT
trap 'early=TERM' TERM
early=''

# A job of a shell without job control leads no group, so setsid need not fork: $! is the command.
marks="${QNNFARM_MARKS:-} run:$marker"
QNNFARM_MARKS=$marks LD_LIBRARY_PATH=$run_dir ADSP_LIBRARY_PATH=$run_dir PATH=$run_dir:$PATH \
  $launch "$@" </dev/null >>"$out" 2>>"$log" &
pid=$!
trap 'interrupt HUP' HUP
trap 'interrupt INT' INT
trap 'interrupt TERM' TERM
find_start_time $$
echo "$$ $start_time" >.qnnfarm/process
[ -z "$early" ] || interrupt "$early"
start_sampler

ticks=0
while :; do
  sample "$pid"
  [ "$alive" -eq 1 ] || break
  find_uptime
  passed=$((now_s - began_s))
  seen=$((seen + 1))
  seen_ms=$((passed * 1000 + (now_cs - began_cs) * 10))
  if [ "$passed" -gt "$timeout_s" ] || { [ "$passed" -eq "$timeout_s" ] && [ "$now_cs" -ge "$began_cs" ]; }; then
    reason=timeout
    stop_run
    break
  fi
  # Finding the members is the dear part: every second, but more often at first, for short runs.
  [ "$passed" -lt "$tell_s" ] || tell_progress
  if [ "$ticks" -lt 5 ] || [ $((ticks % 5)) -eq 0 ]; then
    members=$(marked_pids "run:$marker")
    # shellcheck disable=SC2086
    [ -z "$sampler" ] || echo $members >.qnnfarm/members
    sample_memory "$pid"
    for member in $members; do
      case $member in "$pid" | "$sampler") ;; *) sample_memory "$member" ;; esac
    done
    # What is written on into a deleted file has no size to look at.
    if ! [ -e "$log" ] || ! [ -e "$out" ]; then
      reason=log-gone
      stop_run
      break
    fi
    blocks=$(stat -c %b "$log" 2>/dev/null)
    blocks_out=$(stat -c %b "$out" 2>/dev/null)
    if [ "${blocks:-0}" -gt $((max_log_mib * 2048)) ] || [ "${blocks_out:-0}" -gt $((max_log_mib * 2048)) ]; then
      reason=log-too-big
      stop_run
      break
    fi
  fi
  for member in $members; do
    case $member in "$pid" | "$sampler") ;; *) sample "$member" ;; esac
  done
  sleep 0.2
  ticks=$((ticks + 1))
done
finish
