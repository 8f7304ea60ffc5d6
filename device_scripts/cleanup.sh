#!/bin/sh
# Kills whatever of a run still lives and removes its folder.
#   cleanup.sh [-k] RUN_DIR            -k: kill only, keep the folder
# README.md beside this file: output, exit codes.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125

keep=0
if [ "${1:-}" = -k ]; then
  keep=1
  shift
fi
[ $# -eq 1 ] || die 2 'usage: cleanup.sh [-k] RUN_DIR'
run_dir=${1%/}
id=${run_dir##*/}
runs=${run_dir%/*}
# This ends in rm -rf: the folder must look like a run of a work root, and be no link to elsewhere.
valid_run_id "$id" && [ "$runs" != "$run_dir" ] && [ "${runs##*/}" = runs ] && [ -d "${runs%runs}store" ] ||
  die 2 "not the folder of a run (WORK_ROOT/runs/RUN_ID): $1"
[ ! -L "$run_dir" ] || die 2 "a symbolic link is not the folder of a run: $1"
if [ ! -e "$run_dir" ]; then
  echo 'qnnfarm-cleanup killed=0 leftover=0 removed=0'
  exit 0
fi
[ -d "$run_dir" ] || die 2 "not a folder: $1"

ended=0
killed=0
leftover=0
# First run.sh itself, by PID and start time; it then ends its command on its own.
if [ -f "$run_dir/.qnnfarm/process" ]; then
  read -r pid began rest <"$run_dir/.qnnfarm/process"
  if valid_number "$pid" && valid_number "$began" && [ "$pid" -gt 1 ]; then
    find_start_time "$pid"
    if [ "$start_time" = "$began" ] && kill -s TERM "$pid" 2>/dev/null; then
      ended=1
      ticks=0
      while [ "$start_time" = "$began" ] && [ "$ticks" -lt 50 ]; do
        sleep 0.1
        find_start_time "$pid"
        ticks=$((ticks + 1))
      done
      [ "$start_time" != "$began" ] || kill -s KILL "$pid" 2>/dev/null
    fi
  fi
fi
if [ -f "$run_dir/.qnnfarm/marker" ]; then
  marker=''
  read -r marker <"$run_dir/.qnnfarm/marker"
  # A short or odd marker would match strangers.
  if valid_run_id "$marker" && [ "${#marker}" -ge 32 ]; then
    end_marked "run:$marker"
  fi
fi
removed=0
if [ "$keep" -eq 0 ] && [ "$leftover" -eq 0 ]; then
  find "$run_dir" -type d -exec chmod u+rwx {} + 2>/dev/null
  rm -rf "$run_dir" 2>/dev/null
  [ -e "$run_dir" ] || removed=1
fi
echo "qnnfarm-cleanup killed=$((ended + killed)) leftover=$leftover removed=$removed"
[ "$leftover" -eq 0 ] && [ "$removed" -ne "$keep" ]
