#!/bin/sh
# Says which contents the store of a device really holds, by hashing them on the device.
#   verify.sh WORK_ROOT [LIST]       lines of LIST (or stdin): SHA256 SIZE
#   verify.sh -a WORK_ROOT [LIST]    adopt: the files wait in incoming/, the good ones move to store/
# README.md beside this file: output, memo, exit codes.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125

adopt=0
if [ "${1:-}" = -a ]; then
  adopt=1
  shift
fi
[ $# -eq 1 ] || [ $# -eq 2 ] || die 2 'usage: verify.sh [-a] WORK_ROOT [LIST]'
if [ $# -eq 2 ]; then
  [ -r "$2" ] || die 2 "cannot read the list $2"
  exec <"$2"
fi
cd "$1" 2>/dev/null || die 1 "no work root $1; run setup.sh"
[ -d store ] && [ -d incoming ] || die 1 "$1 is no work root; run setup.sh"

# Sets identity: what changes when the file's bytes do. ctime (%z) is in it because nothing can set
# it back, and with nanoseconds because a second is long enough to write a file twice.
find_identity() { # FILE
  identity=$(stat -c '%s %i %y %z' "$1" 2>/dev/null)
}

remembered() { # SHA256 IDENTITY
  [ -f "store/.memo/$1" ] || return 1
  memo=''
  read -r memo 2>/dev/null <"store/.memo/$1"
  [ "$memo" = "$2" ]
}

# A memo is one small file for each content: replaced by rename, so that a reader sees all or
# nothing of it and two verifiers cannot mix theirs.
remember() { # SHA256 IDENTITY
  mkdir -p store/.memo 2>/dev/null
  { echo "$2" >"store/.memo/.$1.$$" && mv -f "store/.memo/.$1.$$" "store/.memo/$1"; } 2>/dev/null ||
    rm -f "store/.memo/.$1.$$"
}

check() { # FILE SHA256 SIZE; sets answer to ok, missing or bad
  answer=missing
  if [ -L "$1" ]; then
    answer=bad
    return 0
  fi
  [ -e "$1" ] || return 0
  answer=bad
  [ -f "$1" ] || return 0
  find_identity "$1"
  [ "${identity%% *}" = "$3" ] || return 0
  if remembered "$2" "$identity"; then
    answer=ok
    return 0
  fi
  before=$identity
  hash=$(sha256sum "$1" 2>/dev/null)
  [ "${hash%% *}" = "$2" ] || return 0
  find_identity "$1"
  [ "$before" = "$identity" ] || return 0
  answer=ok
}

ok=0
missing=0
bad=0
while read -r sha size rest; do
  if ! valid_sha256 "$sha" || ! valid_number "$size" || [ -n "$rest" ]; then
    die 2 "no line of the form SHA256 SIZE: $sha $size $rest"
  fi
  file=store/$sha
  [ "$adopt" -eq 0 ] || file=incoming/$sha
  check "$file" "$sha" "$size"
  if [ "$answer" = ok ] && [ "$adopt" -eq 1 ]; then
    chmod 0644 "$file" && mv -f "$file" "store/$sha" || answer=bad
  fi
  if [ "$answer" = ok ]; then
    find_identity "store/$sha" # again: chmod and mv change ctime
    remember "$sha" "$identity"
  fi
  case $answer in
    ok) ok=$((ok + 1)) ;;
    missing) missing=$((missing + 1)) ;;
    bad) bad=$((bad + 1)) ;;
  esac
  echo "$answer $sha"
done
echo "qnnfarm-verify ok=$ok missing=$missing bad=$bad"
[ "$missing" -eq 0 ] && [ "$bad" -eq 0 ]
