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
marker=${QNNFARM_RUN_ID:-}
. "$here/common.sh" || exit 125
# Removed there lest a script count as part of a run; this one does, and dies with it.
[ -z "$marker" ] || export QNNFARM_RUN_ID="$marker"

max_zones=12
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

# --- what there is to sample -----------------------------------------------------------------------

# Adds FILE (relative to the root of sysfs) as the next channel, when it can be read now.
add_channel() { # UNIT NAME FILE
  [ -e "$3" ] || return 1
  if [ ! -r "$3" ]; then
    echo "denied $3"
    return 1
  fi
  value=''
  read -r value rest <"$3"
  case $value in
    '' | *[!0-9-]*)
      echo "silent $3"
      return 1
      ;;
  esac
  echo "channel $channels $1 $2"
  channels=$((channels + 1))
  files="$files $3"
}

safe_word() { # TEXT
  case $1 in '' | *[!A-Za-z0-9._-]*) return 1 ;; esac
  [ "${#1}" -le 60 ]
}

# One clock for all CPUs that share it: the lowest of them names it.
add_cpus() {
  for folder in devices/system/cpu/cpu[0-9]*/cpufreq; do
    [ -d "$folder" ] || continue
    number=${folder#devices/system/cpu/cpu}
    number=${number%/cpufreq}
    valid_number "$number" && [ "${#number}" -le 4 ] || continue
    first=$number
    [ ! -r "$folder/related_cpus" ] || read -r first rest <"$folder/related_cpus"
    [ "$first" = "$number" ] || [ ! -e "devices/system/cpu/cpu$first/cpufreq" ] || continue
    [ "$channels" -lt 16 ] || return 0
    add_channel kHz "cpu_hz:$number" "$folder/scaling_cur_freq" ||
      add_channel kHz "cpu_hz:$number" "$folder/cpuinfo_cur_freq" || continue
    capped="$capped $number"
  done
}

# What the kernel allows: thermal control lowers it.
add_caps() {
  for number in $capped; do
    add_channel kHz "cpu_cap_hz:$number" "devices/system/cpu/cpu$number/cpufreq/scaling_max_freq"
  done
}

add_ddr() {
  add_channel kHz ddr_hz devices/system/cpu/bus_dcvs/DDR/cur_freq && return 0
  for folder in class/devfreq/*; do
    case ${folder##*/} in
      *[!A-Za-z0-9._:,@-]*) ;;
      *ddr* | *DDR* | *dmc* | *mif*) add_channel Hz ddr_hz "$folder/cur_freq" && return 0 ;;
    esac
  done
}

add_gpu() {
  for file in class/kgsl/kgsl-3d0/devfreq/cur_freq class/kgsl/kgsl-3d0/gpuclk; do
    add_channel Hz gpu_hz "$file" && return 0
  done
}

add_battery() {
  for folder in class/power_supply/battery class/power_supply/*; do
    case ${folder##*/} in *[!A-Za-z0-9._-]*) continue ;; esac
    kind=''
    [ ! -r "$folder/type" ] || read -r kind <"$folder/type"
    [ "$kind" = Battery ] || [ "${folder##*/}" = battery ] || continue
    add_channel uA battery_a "$folder/current_now"
    add_channel uV battery_v "$folder/voltage_now"
    battery=$folder
    return 0
  done
}

# The zones that matter most first: a phone has up to a hundred, and the framework lends some to
# what is no temperature at all (battery limits, charge).
list_zones() { # sets zones to words NUMBER:TYPE
  zones=''
  for folder in class/thermal/thermal_zone[0-9]*; do
    number=${folder#class/thermal/thermal_zone}
    valid_number "$number" && [ "${#number}" -le 4 ] || continue
    kind=''
    [ ! -r "$folder/type" ] || read -r kind <"$folder/type"
    safe_word "$kind" || kind=zone$number
    case $kind in
      *bcl* | *vbat* | *ibat* | *vph* | *-lvl[0-9]* | soc | socd | *-step | *-usr | *-lowf) ;;
      *) zones="$zones $number:$kind" ;;
    esac
  done
}

add_zone() { # NUMBER:TYPE
  [ "$zone_count" -lt "$max_zones" ] && [ "$class_count" -lt "$1" ] || return 1
  add_channel mC "temp_c:${2#*:}" "class/thermal/thermal_zone${2%%:*}/temp" || return 1
  zone_count=$((zone_count + 1))
  class_count=$((class_count + 1))
}

add_zones() {
  list_zones
  zone_count=0
  taken=' '
  for class in npu skin cpu gpu ddr battery pmic other; do
    class_count=0
    for zone in $zones; do
      case $class:${zone#*:} in
        npu:*nsp* | npu:*npu* | npu:*cdsp* | npu:*hvx* | npu:*hmx*) most=3 ;;
        skin:*skin* | skin:*shell* | skin:*quiet* | skin:xo*) most=2 ;;
        cpu:*cpu*) most=3 ;;
        gpu:*gpu*) most=1 ;;
        ddr:*ddr*) most=1 ;;
        battery:*batt*) most=1 ;;
        pmic:pm[0-9]* | pmic:pmic*) most=1 ;;
        other:*) most=$max_zones ;;
        *) continue ;;
      esac
      case $taken in *" ${zone%%:*} "*) continue ;; esac
      [ "$class_count" -lt "$most" ] || continue
      taken="$taken${zone%%:*} "
      add_zone "$most" "$zone"
    done
  done
}

own_channel() { # UNIT NAME
  echo "channel $channels $1 $2"
  channels=$((channels + 1))
}

# Prints the channels; sets every, the files that are read for each sample, and in_turn, of which
# some are. The memory of the run follows the former, its peak comes last.
discover() {
  channels=0
  files='' capped='' battery=''
  add_cpus
  add_ddr
  add_gpu
  add_battery
  every=$files
  own_channel pages rss_bytes
  first_in_turn=$channels
  files=''
  add_caps
  add_zones
  in_turn=$files
  peak_channel=$channels
  own_channel kB rss_peak_bytes
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
  find_cpu
  echo "qnnfarm-telemetry end=$reason samples=$lines cpu_ticks=$cpu elapsed_cs=$now"
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
  for word in capacity temp status health; do
    [ -n "$battery" ] && [ -e "$battery/$word" ] || continue
    value=''
    read -r value <"$battery/$word" || [ -n "$value" ] || echo "denied $battery/$word"
    [ "${#value}" -gt 60 ] || echo "battery $word $value"
  done
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
