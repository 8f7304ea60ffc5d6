#!/bin/sh
# Puts a device into the state for a measured run, and back.
#   prepare.sh apply WORK_ROOT [wake-lock] [stay-awake] [fixed-performance] [governor=NAME] [screen-off]
#   prepare.sh restore WORK_ROOT
# README.md beside this file: output, exit codes.
#
# What is changed is noted in WORK_ROOT/prepared before it is changed, so that whoever comes next can
# undo what a session that died has left.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125

usage='usage: prepare.sh apply WORK_ROOT [CHANGE...] | restore WORK_ROOT'
lock=qnnfarm
cpus=devices/system/cpu

# Blanks and bars as one blank: what the device says cannot make a second field, or line.
plain() { # TEXT; sets text
  set -f
  old_ifs=$IFS
  IFS="|$IFS"
  # shellcheck disable=SC2086
  set -- $1
  IFS=' '
  text="$*"
  IFS=$old_ifs
  set +f
}

tell() { # NAME OUTCOME BEFORE AFTER REASON
  told=record
  for field in "$@"; do
    plain "$field"
    told="$told|$text"
  done
  echo "$told"
  [ "$2" != not-restored ] || failed=1
}

has() { # TOOL
  command -v "$1" >/dev/null 2>&1
}

# What cannot be noted is not changed.
note() { # WHAT VALUE
  echo "$1 $2" 2>/dev/null >>"$notes" || cannot_write "$notes"
}

# --- one change each: do, and undo by what was noted -------------------------------------------------

do_wake_lock() {
  if [ ! -w power/wake_lock ]; then
    tell wake_lock unavailable '' '' 'power/wake_lock is not writable: it takes root'
    return
  fi
  note wake_lock "$lock"
  echo "$lock" 2>/dev/null >power/wake_lock
  held=''
  read -r held 2>/dev/null <power/wake_lock
  case " $held " in
    *" $lock "*) tell wake_lock met '' "$lock" '' ;;
    *) tell wake_lock not-met '' "$held" 'the kernel does not hold the lock' ;;
  esac
}

undo_wake_lock() {
  echo "$lock" 2>/dev/null >power/wake_unlock
  held=''
  read -r held 2>/dev/null <power/wake_lock
  case " $held " in
    *" $lock "*) tell wake_lock not-restored "$lock" "$held" 'the kernel still holds the lock' ;;
    *) tell wake_lock restored "$lock" "$held" '' ;;
  esac
}

find_stay_on() { # sets stay_on
  stay_on=$(settings get global stay_on_while_plugged_in 2>/dev/null)
}

do_stay_awake() {
  if ! has settings; then
    tell stay_awake unavailable '' '' 'no settings command'
    return
  fi
  find_stay_on
  before=$stay_on
  valid_number "$before" || before=null
  note stay_awake "$before"
  settings put global stay_on_while_plugged_in 7 >/dev/null 2>&1
  find_stay_on
  if [ "$stay_on" = 7 ]; then
    tell stay_awake met "$before" 7 ''
  else
    tell stay_awake not-met "$before" "$stay_on" 'the setting did not change'
  fi
}

undo_stay_awake() { # BEFORE
  if valid_number "$1"; then
    settings put global stay_on_while_plugged_in "$1" >/dev/null 2>&1
  else
    settings delete global stay_on_while_plugged_in >/dev/null 2>&1
  fi
  find_stay_on
  if [ "$stay_on" = "$1" ]; then
    tell stay_awake restored 7 "$stay_on" ''
  else
    tell stay_awake not-restored 7 "$stay_on" "it was $1"
  fi
}

# Android 11 and later, where the vendor's power HAL knows it. It cannot be read back: the HAL's own
# answer is all that there is.
do_fixed_performance() {
  if ! has cmd; then
    tell fixed_performance unavailable '' '' 'no cmd command'
    return
  fi
  note fixed_performance false
  if said=$(cmd power set-fixed-performance-mode-enabled true 2>&1); then
    case $said in
      *[Ff]ailed* | *[Uu]nknown*) tell fixed_performance not-met '' '' "the device said: $said" ;;
      *) tell fixed_performance met '' true 'accepted, and it cannot be read back' ;;
    esac
  else
    tell fixed_performance not-met '' '' "the device said: $said"
  fi
}

undo_fixed_performance() {
  if said=$(cmd power set-fixed-performance-mode-enabled false 2>&1); then
    tell fixed_performance restored true false ''
  else
    tell fixed_performance not-restored true '' "the device said: $said"
  fi
}

do_governor() { # NAME
  changed=0 all=0 denied=0 before='' after=''
  for file in "$cpus"/cpu[0-9]*/cpufreq/scaling_governor; do
    [ -e "$file" ] || continue
    all=$((all + 1))
    cpu=${file#"$cpus"/cpu}
    cpu=${cpu%%/*}
    old=''
    read -r old 2>/dev/null <"$file"
    valid_number "$cpu" && valid_run_id "$old" || continue
    before=$old
    if [ ! -w "$file" ]; then
      denied=$((denied + 1))
      continue
    fi
    note governor "$cpu:$old"
    echo "$1" 2>/dev/null >"$file"
    read -r after 2>/dev/null <"$file"
    [ "$after" != "$1" ] || changed=$((changed + 1))
  done
  if [ "$all" -eq 0 ]; then
    tell governor unavailable '' '' 'no CPU has a governor'
  elif [ "$denied" -eq "$all" ]; then
    tell governor unavailable "$before" '' 'the governors are not writable: it takes root'
  elif [ "$changed" -eq "$all" ]; then
    tell governor met "$before" "$1" ''
  else
    tell governor not-met "$before" "$after" "$changed of $all CPUs took $1"
  fi
}

undo_governor() { # CPU:GOVERNOR
  file=$cpus/cpu${1%%:*}/cpufreq/scaling_governor
  now=''
  echo "${1#*:}" 2>/dev/null >"$file"
  read -r now 2>/dev/null <"$file"
  if [ "$now" = "${1#*:}" ]; then
    tell "governor.${1%%:*}" restored '' "$now" ''
  else
    tell "governor.${1%%:*}" not-restored '' "$now" "it was ${1#*:}"
  fi
}

find_wakefulness() { # sets wakefulness
  wakefulness=$(dumpsys power 2>/dev/null | while read -r line; do
    case $line in
      mWakefulness=*)
        echo "${line#mWakefulness=}"
        break
        ;;
    esac
  done)
}

# Sends a key, and waits until the device is awake, or is not.
press() { # KEY WANTED
  input keyevent "$1" >/dev/null 2>&1 || return 1
  tries=0
  while [ "$tries" -lt 20 ]; do
    find_wakefulness
    case $wakefulness:$2 in
      Awake:awake | Asleep:asleep | Dozing:asleep) return 0 ;;
    esac
    sleep 0.1
    tries=$((tries + 1))
  done
  return 1
}

do_screen_off() {
  if ! has input || ! has dumpsys; then
    tell screen unavailable '' '' 'no input or dumpsys command'
    return
  fi
  find_wakefulness
  before=$wakefulness
  case $before in
    '') tell screen unavailable '' '' 'the device does not tell whether it is awake' ;;
    Asleep | Dozing) tell screen met "$before" "$before" 'it was off' ;;
    *)
      note screen on
      if press KEYCODE_SLEEP asleep; then
        tell screen met "$before" "$wakefulness" ''
      else
        tell screen not-met "$before" "$wakefulness" 'the screen did not go off'
      fi
      ;;
  esac
}

undo_screen() {
  if press KEYCODE_WAKEUP awake; then
    tell screen restored '' "$wakefulness" ''
  else
    tell screen not-restored '' "$wakefulness" 'the screen did not come on'
  fi
}

# --- all of it ---------------------------------------------------------------------------------------

# Undoes what is noted, the last change first. What cannot be undone now stays noted for the next.
restore() {
  [ -f "$notes" ] || return 0
  undo='' left=''
  while read -r what value; do
    undo="$what=$value $undo"
  done <"$notes"
  set -f
  for change in $undo; do
    value=${change#*=}
    failed=0
    case $change in
      wake_lock=*) undo_wake_lock ;;
      stay_awake=null | stay_awake=[0-9]*) undo_stay_awake "$value" ;;
      fixed_performance=*)
        undo_fixed_performance
        failed=0 # a device that never took it refuses this too
        ;;
      governor=*)
        valid_number "${value%%:*}" && valid_run_id "${value#*:}" && undo_governor "$value"
        ;;
      screen=*) undo_screen ;;
    esac
    [ "$failed" -eq 0 ] || left="${change%%=*} $value
$left"
  done
  set +f
  if [ -z "$left" ]; then
    rm -f "$notes"
  else
    printf %s "$left" >"$notes.left" && mv -f "$notes.left" "$notes"
  fi
}

[ $# -ge 2 ] || die 2 "$usage"
mode=$1
cd "$2" 2>/dev/null || die 1 "no work root $2"
notes=$(pwd -P)/prepared
[ ! -L "$notes" ] || die 1 "$notes is a symbolic link; remove it"
shift 2
case $mode in
  apply) ;;
  restore) [ $# -eq 0 ] || die 2 "$usage" ;;
  *) die 2 "$usage" ;;
esac
for change in "$@"; do
  case $change in
    wake-lock | stay-awake | fixed-performance | screen-off) ;;
    governor=*) valid_run_id "${change#governor=}" || die 2 "no governor: $change" ;;
    *) die 2 "no such change: $change" ;;
  esac
done
cd "${QNNFARM_SYS_ROOT:-/sys}" 2>/dev/null || cd /
set +f
restore
if [ "$mode" = apply ] && [ $# -gt 0 ]; then
  (: >>"$notes") 2>/dev/null || cannot_write "$notes"
fi
for change in "$@"; do
  case $change in
    wake-lock) do_wake_lock ;;
    stay-awake) do_stay_awake ;;
    fixed-performance) do_fixed_performance ;;
    governor=*) do_governor "${change#governor=}" ;;
    screen-off) do_screen_off ;;
  esac
done
echo "qnnfarm-prepare ok=1"
