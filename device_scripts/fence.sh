#!/bin/sh
# Keeps late holders of a lease away from a device that went to another.
#   fence.sh WORK_ROOT claim TOKEN HOLDER [ID [QUIET [TAKE]]]   raise the fence, end what is left
#   fence.sh WORK_ROOT sweep TOKEN HOLDER                       end what this holder left
# README.md beside this file: how it works, output, exit codes.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125

[ $# -ge 4 ] && [ $# -le 7 ] ||
  die 2 'usage: fence.sh WORK_ROOT claim|sweep TOKEN HOLDER [ID [QUIET [TAKE]]]'
case $1 in
  /*) root=${1%/} ;;
  *) die 2 "the work root must be an absolute path: $1" ;;
esac
token=$3
holder=$4
known=${5:-}
quiet=${6:-}
take=${7:-}
furthest=1000000 # a token so far above another is no grant of its ledger
is_token() { # TEXT; nine digits stay within 32 bits
  valid_number "$1" && [ "${#1}" -le 9 ]
}
is_token "$token" && [ "${token#0}" = "$token" ] ||
  die 2 "the token must be a number from 1 to 999999999: $token"
grant=${holder%% *}
ledger=${grant%%-*}
valid_run_id "$grant" && [ -n "$ledger" ] ||
  die 2 "a holder begins with the ids of its ledger and grant: $holder"
fence=$root/fence
name=$token-$grant

# Sets number, is_ours, by and record: the token in the name of a FILE of the fence, whether our
# ledger granted its lease, its grant (`-` once the holder has given the device back; nothing, on a
# disk that was full), and to whom.
read_holder() { # FILE
  number=${1##*/}
  case ${number#*-} in
    "$ledger" | "$ledger"-*) is_ours=1 ;;
    *) is_ours='' ;;
  esac
  number=${number%%-*}
  by=''
  record=''
  is_token "$number" || return 1
  read -r by record 2>/dev/null <"$1" || true
}

# Whether a FILE of the fence is of a later grant of our ledger, or of another one with our token.
is_later() { # FILE
  [ -n "$is_ours" ] && [ "$number" -ge "$token" ] && [ "${1##*/}" != "$name" ]
}

refuse() { # TOKEN RECORD
  printf '%s\n' "qnnfarm-fence refused=$1 $2"
  exit 3
}

# Ends the claim where a later one of our ledger was made here, or where somebody has the device
# whom our ledger did not name in TAKE: a holder of another ledger, or of a copy of ours.
look_at_others() {
  highest=0
  above=''
  held=''
  for file in "$fence"/[0-9]*; do
    read_holder "$file" || continue
    if is_later "$file"; then
      [ "$number" -le $((token + furthest)) ] || continue
      if [ "$number" -gt "$highest" ]; then
        highest=$number
        above=$record
      fi
      continue
    fi
    case $by in '' | - | "$grant") continue ;; esac
    case ",$take," in
      *",${file##*/},"*) ;;
      *) held="${file##*/} $record" ;;
    esac
  done
  if [ "$highest" -gt 0 ] || [ -n "$held" ]; then
    [ "$highest" -eq 0 ] || refuse "$highest" "$above"
    printf '%s\n' "qnnfarm-fence held=$held"
    exit 5
  fi
}

# The marks of holders begin with this; it is unlike that of any other device that shares the kernel.
read_id() {
  id=''
  read -r id 2>/dev/null <"$fence/id"
  valid_run_id "$id" && [ "${#id}" -ge 32 ]
}

# Sets look: whether processes of former holders may be left.
raise_fence() {
  if ! read_id; then
    (set -C; cat /proc/sys/kernel/random/uuid >"$fence/id") 2>/dev/null
    # Cut off while it was written, or on a disk that was full.
    read_id || cat /proc/sys/kernel/random/uuid 2>/dev/null >"$fence/id"
    read_id || cannot_write "$fence"
  fi
  look_at_others
  # An empty file, left behind, would be a holder that nobody knows.
  printf '%s\n' "$holder" 2>/dev/null >"$fence/$name" || {
    rm -f "$fence/$name"
    cannot_write "$fence"
  }
  former=none
  for file in "$fence"/[0-9]*; do
    read_holder "$file" && [ "${file##*/}" != "$name" ] || continue
    if [ "$former" = none ]; then former=${file##*/}; else former=several; fi
    rm -f "$file"
  done
  # Its claim ended what was there before, and it ran nothing.
  if [ "$former" = "$quiet" ]; then look=0; else look=1; fi
}

# The device went to another.
refuse_late() {
  for file in "$fence"/[0-9]*; do
    ! read_holder "$file" || refuse "$number" "$record"
  done
  refuse 0 ''
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
    end_marked "lease:$id." "lease:$id.$name."
  else
    end_marked "lease:$id.$name."
  fi
  [ "$leftover" -eq 0 ] || left=$((left + 1))
}

act() {
  if [ "$mode" = claim ]; then
    raise_fence
  else
    read_id && [ -e "$fence/$name" ] || refuse_late
    look=1
  fi
  end_others
  echo "qnnfarm-fence token=$token id=$id ended=$ended left=$left"
  [ "$left" -eq 0 ]
  exit
}

mode=$2
case $mode in
  claim)
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
  sweep) [ -d "$fence" ] || refuse_late ;;
  *) die 2 "claim or sweep, not $mode" ;;
esac

# One after the other: a claim whose host died goes on here, and would end what a greater one, which
# came meanwhile, lets its holder begin. The kernel lets go of the lock when its holder dies.
command -v flock >/dev/null 2>&1 || die 1 'the device has no flock'
: 2>/dev/null >>"$fence/.lock" || cannot_write "$fence"
{ flock 9 && act; } 9>>"$fence/.lock"
die 1 "cannot lock $fence"
