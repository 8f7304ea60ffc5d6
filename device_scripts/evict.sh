#!/bin/sh
# Makes room: removes contents of the store, those used longest ago first, none that is in use.
#   evict.sh WORK_ROOT FREE_KB STORE_KB      STORE_KB: most that the store may hold, or - for no limit
# README.md beside this file: what is in use, output, exit codes.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125

# At most 9 digits of KiB: sums stay within 32 bits.
valid_kb() { # TEXT
  valid_number "$1" && [ "${#1}" -le 9 ]
}
[ $# -eq 3 ] && valid_kb "$2" && { [ "$3" = - ] || valid_kb "$3"; } ||
  die 2 'usage: evict.sh WORK_ROOT FREE_KB STORE_KB (KiB, at most 9 digits; - for no limit)'
cd "$1" 2>/dev/null || die 1 "no work root $1; run setup.sh"
[ -d store ] && [ -d incoming ] && [ -d runs ] || die 1 "$1 is no work root; run setup.sh"
wanted_free=$2
limit=$3

find_free_kb() { # sets free_kb, of at most 9 digits
  find_free "$PWD"
  [ "${#free_kb}" -le 9 ] || free_kb=999999999
}

# Lines whose last path component is a content: `l...` (by ls, as a readlink of several links is
# refused by toybox before 0.8.3) and `keep` what runs and deployments need, `size` in blocks of 512
# bytes, `used` by time.
list_contents() {
  # In this order: a deployment takes its wants back once its run links to them.
  for wants in incoming/*/.wants; do
    [ -f "$wants" ] && while read -r sha rest; do echo "keep /$sha"; done <"$wants"
  done
  find runs -type l -exec ls -ld {} + 2>/dev/null
  find store -mindepth 1 -maxdepth 1 -type f -exec stat -c 'size %b %n' {} + 2>/dev/null
  find store/.memo -type f -exec stat -c '%Y %n' {} + 2>/dev/null | sort -n | while read -r line; do
    echo "used $line"
  done
}

# Reads what list_contents prints. Sets total_kb and evictable_kb, and the contents that may go,
# oldest first, as candidates; kb_SHA256 holds the size of each.
read_contents() {
  total_kb=0
  evictable_kb=0
  all=''
  candidates=''
  while IFS= read -r line; do
    sha=${line##*/}
    valid_sha256 "$sha" || continue
    case $line in
      l* | keep*) eval "kept_$sha=1" ;;
      size*)
        kb=${line#size }
        kb=$(((${kb%% *} + 1) / 2))
        total_kb=$((total_kb + kb))
        eval "kb_$sha=$kb"
        all="$all $sha"
        ;;
      used*)
        eval "kb=\${kb_$sha:-} kept=\${kept_$sha:-}; seen_$sha=1"
        if [ -n "$kb" ] && [ -z "$kept" ]; then
          candidates="$candidates $sha"
          evictable_kb=$((evictable_kb + kb))
        fi
        ;;
    esac
  done
  # What verify.sh does not remember was never used.
  for sha in $all; do
    eval "seen=\${seen_$sha:-} kept=\${kept_$sha:-} kb=\$kb_$sha"
    if [ -z "$seen" ] && [ -z "$kept" ]; then
      candidates="$sha $candidates"
      evictable_kb=$((evictable_kb + kb))
    fi
  done
}

find_excess() { # sets excess_kb: what must go
  excess_kb=0
  if [ -n "$free_kb" ] && [ "$free_kb" -lt "$wanted_free" ]; then
    excess_kb=$((wanted_free - free_kb))
  fi
  if [ "$limit" != - ] && [ $((total_kb - limit)) -gt "$excess_kb" ]; then
    excess_kb=$((total_kb - limit))
  fi
}

# Where all that may go is not enough, nothing goes.
make_room() {
  find_free_kb
  if [ -n "$free_kb" ] && [ "$free_kb" -lt "$wanted_free" ]; then
    clean_incoming 10
    find_free_kb
  fi
  list_contents | {
    read_contents
    find_excess
    evicted=0
    evicted_kb=0
    if [ "$excess_kb" -gt 0 ] && [ "$excess_kb" -le "$evictable_kb" ]; then
      for sha in $candidates; do
        [ "$evicted_kb" -lt "$excess_kb" ] || break
        rm -f "store/$sha" "store/.memo/$sha" || continue
        eval "kb=\$kb_$sha"
        evicted=$((evicted + 1))
        evicted_kb=$((evicted_kb + kb))
      done
      find_free_kb
    fi
    met=0
    [ "$evicted_kb" -lt "$excess_kb" ] || met=1
    echo "free_kb=$free_kb"
    echo "store_kb=$((total_kb - evicted_kb))"
    echo "evictable_kb=$((evictable_kb - evicted_kb))"
    echo "qnnfarm-evict evicted=$evicted evicted_kb=$evicted_kb met=$met"
    [ "$met" -eq 1 ]
  }
}

locked make_room
