#!/bin/sh
# Keeps late holders of a lease away from a device that went to another.
#   fence.sh WORK_ROOT claim TOKEN HOLDER [ID [QUIET [TAKE]]]   raise the fence, end what is left
#   fence.sh WORK_ROOT sweep TOKEN                              end what this holder left
# README.md beside this file: how it works, output, exit codes.

idle_minutes=10

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125

[ $# -ge 3 ] && [ $# -le 7 ] ||
  die 2 'usage: fence.sh WORK_ROOT claim|sweep TOKEN [HOLDER [ID [QUIET [TAKE]]]]'
case $1 in
  /*) root=${1%/} ;;
  *) die 2 "the work root must be an absolute path: $1" ;;
esac
token=$3
holder=${4:-}
known=${5:-}
quiet=${6:-}
take=${7:-}
is_token() { # TEXT; nine digits stay within 32 bits
  valid_number "$1" && [ "${#1}" -le 9 ]
}
is_token "$token" && [ "${token#0}" = "$token" ] ||
  die 2 "the token must be a number from 1 to 999999999: $token"
valid_number "${quiet:-0}" || die 2 "the token of a quiet lease must be a number: $quiet"
fence=$root/fence

# Sets highest: the greatest token that was ever claimed here, 0 if none was.
find_highest() {
  highest=0
  for file in "$fence"/[0-9]*; do
    number=${file##*/}
    if is_token "$number" && [ "$number" -gt "$highest" ]; then
      highest=$number
    fi
  done
}

# Sets ledger and record: which ledger gave the device to the holder of TOKEN, and who that is. The
# ledger is `-` once the holder has given the device back.
read_holder() { # TOKEN
  ledger=''
  record=''
  read -r ledger record 2>/dev/null <"$fence/$1"
}

refuse() {
  find_highest
  read_holder "$highest"
  printf '%s\n' "qnnfarm-fence refused=$highest $record"
  exit 3
}

# Another ledger knows nothing of ours, and ours nothing of it: what its holder does is seen here
# alone. Says so, and whether the holder shows signs of life.
find_other_ledger() {
  find_highest
  read_holder "$highest"
  case $ledger in
    '' | - | "${holder%% *}") ;;
    *)
      [ "$take" != "$highest" ] || return 0
      alive=1
      [ -n "$(find "$fence/$highest" "$fence/used" -mmin "-$idle_minutes" 2>/dev/null)" ] ||
        [ -n "$(marked_pids "lease:$id.$highest.")" ] || alive=0
      printf '%s\n' "qnnfarm-fence held=$highest alive=$alive $record"
      exit 5
      ;;
  esac
}

# The marks of holders begin with this; it is unlike that of any other device that shares the kernel.
read_id() {
  id=''
  read -r id 2>/dev/null <"$fence/id"
  valid_run_id "$id" && [ "${#id}" -ge 32 ]
}

# Sets look: whether processes of former holders may be left. Each makes its file first and looks
# then, so that of claims at the same time the greatest stays even where there is no lock.
raise_fence() {
  if ! read_id; then
    (set -C; cat /proc/sys/kernel/random/uuid >"$fence/id") 2>/dev/null
    # Cut off while it was written, or on a disk that was full.
    read_id || cat /proc/sys/kernel/random/uuid 2>/dev/null >"$fence/id"
    read_id || die 1 "cannot write to $fence: full or read-only"
  fi
  find_other_ledger
  # A new ledger counts from 1 again: of one number there is one holder.
  if [ "$highest" -eq "$token" ] && [ "$ledger" != "${holder%% *}" ]; then refuse; fi
  printf '%s\n' "$holder" 2>/dev/null >"$fence/$token" ||
    die 1 "cannot write to $fence: full or read-only"
  find_highest
  if [ "$highest" -gt "$token" ]; then
    rm -f "$fence/$token"
    refuse
  fi
  former=none
  for file in "$fence"/[0-9]*; do
    number=${file##*/}
    # A greater one may have come since we looked: it ends us, not we it.
    if is_token "$number" && [ "$number" -ge "$token" ]; then continue; fi
    if [ "$former" = none ]; then former=$number; else former=several; fi
    rm -f "$file"
  done
  [ -e "$fence/$token" ] || refuse
  # Its claim ended what was there before, and it ran nothing.
  if [ "$former" = "$quiet" ]; then look=0; else look=1; fi
}

# Runs first: run.sh ends its own in the kind way. Then commands that have no run.
end_others() {
  ended=0
  left=0
  for run_dir in "$root"/runs/*; do
    [ -d "$run_dir" ] && [ ! -L "$run_dir" ] && valid_run_id "${run_dir##*/}" || continue
    [ "$mode" = claim ] || [ -f "$run_dir/.qnnfarm/process" ] || continue
    sh "$here/cleanup.sh" "$run_dir" >/dev/null 2>&1
    if [ -e "$run_dir" ]; then left=$((left + 1)); else ended=$((ended + 1)); fi
  done
  # A folder that was being made when its maker was cut off.
  if [ "$mode" = claim ]; then
    for unmade in "$root"/runs/.[!.]*; do
      if [ -d "$unmade" ] && [ ! -L "$unmade" ]; then rm -rf "$unmade"; fi
    done
  fi
  [ "$look" -eq 1 ] || return 0
  if [ "$mode" = claim ]; then
    end_marked "lease:$id." "lease:$id.$token."
  else
    end_marked "lease:$id.$token."
  fi
  [ "$leftover" -eq 0 ] || left=$((left + 1))
}

act() {
  if [ "$mode" = claim ]; then
    raise_fence
  else
    read_id && [ -e "$fence/$token" ] || refuse
    look=1
  fi
  end_others
  [ -e "$fence/$token" ] || refuse
  echo "qnnfarm-fence token=$token id=$id ended=$ended left=$left"
  [ "$left" -eq 0 ]
  exit
}

mode=$2
case $mode in
  claim)
    [ -n "$holder" ] || die 2 'a claim names its holder'
    if [ -n "$known" ]; then
      read_id
      if [ "$id" != "$known" ]; then
        echo 'qnnfarm-fence other'
        exit 4
      fi
    fi
    # cleanup.sh takes only a folder with a store for a work root.
    [ -d "$fence" ] && [ -d "$root/store" ] || mkdir -p "$fence" "$root/store" 2>/dev/null ||
      die 1 "cannot make the folder $fence"
    [ ! -L "$fence" ] || die 1 "a symbolic link is no fence: $fence"
    ;;
  sweep) [ -d "$fence" ] || refuse ;;
  *) die 2 "claim or sweep, not $mode" ;;
esac

# One after the other: a claim whose host died goes on here, and would end what a greater one, which
# came meanwhile, lets its holder begin. The kernel lets go of the lock when its holder dies.
command -v flock >/dev/null 2>&1 || act
: 2>/dev/null >>"$fence/.lock" || die 1 "cannot write to $fence: full or read-only"
{ flock 9 && act; } 9>>"$fence/.lock"
die 1 "cannot lock $fence"
