#!/bin/sh
# Says which contents the store of a device really holds, by hashing them on the device.
#   verify.sh [-a] [-p AREA] WORK_ROOT [LIST]      lines of LIST (or stdin): SHA256 SIZE
#   -a       adopt: what waits in incoming/ or incoming/*/ moves to store/ when it is good
#   -p AREA  pin: keeps the list as incoming/AREA/.wants, which evict.sh respects
# README.md beside this file: output, memo, exit codes.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125

usage='usage: verify.sh [-a] [-p AREA] WORK_ROOT [LIST]'
adopt=0
area=''
while :; do
  case ${1:-} in
    -a) adopt=1; shift ;;
    -p) valid_run_id "${2:-}" || die 2 "$usage"; area=incoming/$2; shift 2 ;;
    *) break ;;
  esac
done
[ $# -eq 1 ] || [ $# -eq 2 ] || die 2 "$usage"
if [ $# -eq 2 ]; then
  [ -r "$2" ] || die 2 "cannot read the list $2"
  exec <"$2"
fi
cd "$1" 2>/dev/null || die 1 "no work root $1; run setup.sh"
[ -d store ] && [ -d incoming ] || die 1 "$1 is no work root; run setup.sh"

# `end` goes last, so that a list which a full file system cut short is noticed. Only when all of it
# is there it counts, and the lock is taken: nobody shall wait for a host that hangs.
take_list() {
  mkdir -p "$area" && cat >"$area/.arriving" && echo end >>"$area/.arriving" &&
    locked mv -f "$area/.arriving" "$area/.wants"
}
if [ -n "$area" ]; then
  take_list 2>/dev/null || cannot_write "$1/$area"
  exec <"$area/.wants"
fi

# Sets identity: what changes when the file's bytes do. ctime (%z) is in it because nothing can set
# it back, and with nanoseconds because a second is long enough to write a file twice.
find_identity() { # FILE
  identity=$(stat -c '%s %i %y %z' "$1" 2>/dev/null)
}

remembered() { # SHA256 IDENTITY
  memo=''
  [ -f "store/.memo/$1" ] || return 1
  read -r memo 2>/dev/null <"store/.memo/$1"
  [ "$memo" = "$2" ]
}

# A memo is one small file for each content: replaced by rename, so that a reader sees all or
# nothing of it and two verifiers cannot mix theirs. Its mtime is when the content was last used.
remember() { # SHA256 IDENTITY
  [ -d store/.memo ] || mkdir -p store/.memo 2>/dev/null
  { echo "$2" >"store/.memo/.$1.$$" && mv -f "store/.memo/.$1.$$" "store/.memo/$1"; } 2>/dev/null ||
    rm -f "store/.memo/.$1.$$"
}

# Sets hash. Where there is an openssl, it uses the processor's instructions for SHA, which
# coreutils' sha256sum does not (toybox's on Android does, and Android has no openssl); for a small
# file it starts too slowly. Sizes are compared by their digits: the arithmetic has 32 bits.
if command -v openssl >/dev/null 2>&1; then has_openssl=1; else has_openssl=0; fi
find_hash() { # FILE SIZE
  hash=''
  if [ "$has_openssl" -eq 1 ] && [ "${#2}" -ge 8 ]; then
    hash=$(openssl dgst -sha256 -r "$1" 2>/dev/null)
    hash=${hash%% *}
    valid_sha256 "$hash" && return 0
  fi
  hash=$(sha256 "$1" 2>/dev/null)
  hash=${hash%% *}
}

# A file that becomes another while it is hashed (of several deployments of one content each moves its
# own into the store) is looked at again; only what stays as it is can be bad.
check() { # FILE SHA256 SIZE; sets answer to ok, missing or bad
  looks=0
  while :; do
    answer=missing
    if [ -L "$1" ]; then
      answer=bad
      return 0
    fi
    [ -e "$1" ] || return 0
    answer=bad
    [ -f "$1" ] || return 0
    find_identity "$1"
    before=$identity
    hash=''
    if [ "${before%% *}" = "$3" ]; then
      if remembered "$2" "$identity"; then
        answer=ok
        return 0
      fi
      find_hash "$1" "$3"
    fi
    find_identity "$1"
    if [ "$hash" = "$2" ] && [ "$before" = "$identity" ]; then
      answer=ok
      return 0
    fi
    looks=$((looks + 1))
    [ "$before" != "$identity" ] && [ "$looks" -lt 20 ] || return 0
  done
}

# Looks for a good file in incoming/; another deployment may take it at the same time.
adopt() { # SHA256 SIZE
  in_store=$answer
  for candidate in "incoming/$1" incoming/*/"$1"; do
    check "$candidate" "$1" "$2"
    [ "$answer" != missing ] || continue
    in_store=bad
    [ "$answer" = ok ] || continue
    # A folder or a link under the name would swallow what is moved there.
    if [ -L "store/$1" ] || { [ -e "store/$1" ] && [ ! -f "store/$1" ]; }; then rm -rf "store/$1"; fi
    if chmod 0644 "$candidate" 2>/dev/null && mv -f "$candidate" "store/$1" 2>/dev/null; then
      find_identity "store/$1" # again: chmod and mv change ctime
      remember "$1" "$identity"
      answer=adopted
      return 0
    fi
  done
  [ -e "store/$1" ] && check "store/$1" "$1" "$2"
  if [ "$answer" = ok ]; then
    remember "$1" "$identity"
  else
    answer=$in_store
  fi
}

ok=0
missing=0
bad=0
adopted=0
while read -r sha size rest; do
  [ -z "$area" ] || [ "$sha $size" != 'end ' ] || break
  if ! valid_sha256 "$sha" || ! valid_number "$size" || [ -n "$rest" ]; then
    die 2 "no line of the form SHA256 SIZE: $sha $size $rest"
  fi
  check "store/$sha" "$sha" "$size"
  if [ "$answer" = ok ]; then
    [ "$memo" = "$identity" ] || remember "$sha" "$identity"
  elif [ "$adopt" -eq 1 ]; then
    adopt "$sha" "$size"
  fi
  case $answer in
    ok) ok=$((ok + 1)) ;;
    adopted) adopted=$((adopted + 1)) ;;
    missing) missing=$((missing + 1)) ;;
    bad) bad=$((bad + 1)) ;;
  esac
  echo "$answer $sha"
done
# After adopting: what an interrupted deployment left a day ago may still have been of use.
[ -z "$area" ] || locked clean_incoming 1440
echo "qnnfarm-verify ok=$ok missing=$missing bad=$bad adopted=$adopted"
[ "$missing" -eq 0 ] && [ "$bad" -eq 0 ]
