#!/bin/sh
# Builds a run folder out of links to the store; it appears whole or not at all.
#   link.sh WORK_ROOT RUN_ID [LIST]      lines of LIST (or stdin): SHA256 NAME MODE
# README.md beside this file: which names are allowed, output, exit codes.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125

[ $# -eq 2 ] || [ $# -eq 3 ] || die 2 'usage: link.sh WORK_ROOT RUN_ID [LIST]'
valid_run_id "$2" || die 2 "not a run id (letters, digits, '.', '_', '-'): $2"
if [ $# -eq 3 ]; then
  [ -r "$3" ] || die 2 "cannot read the list $3"
  exec <"$3"
fi
cd "$1" 2>/dev/null || die 1 "no work root $1; run setup.sh"
[ -d store ] && [ -d runs ] || die 1 "$1 is no work root; run setup.sh"
root=$(pwd -P)
run=runs/$2
building=runs/.$2.$$
[ ! -e "$run" ] && [ ! -L "$run" ] || die 1 "the run $2 is there already; clean it up first"

# A relative path that stays below the run folder and out of our own .qnnfarm.
valid_name() { # NAME
  case $1 in
    '' | /* | */ | *//* | . | .. | ./* | ../* | */. | */.. | */./* | */../*) return 1 ;;
    .qnnfarm | .qnnfarm/*) return 1 ;;
    *[[:cntrl:]]*) return 1 ;;
  esac
  [ "${#1}" -le 1024 ]
}

refuse() { # STATUS MESSAGE
  rm -rf "$building"
  die "$1" "$2"
}

mkdir "$building" 2>/dev/null || die 1 "cannot make $root/$building"
trap 'rm -rf "$building"' EXIT
trap 'exit 129' HUP INT TERM
files=0
used=''
while IFS= read -r line; do
  sha=${line%% *}
  name=${line#* }
  mode=${name##* }
  name=${name% *}
  valid_sha256 "$sha" || refuse 2 "no line of the form SHA256 NAME MODE: $line"
  case $mode in
    0644 | 0755 | 644 | 755) ;;
    *) refuse 2 "the mode must be 0644 or 0755: $line" ;;
  esac
  valid_name "$name" || refuse 2 "not a name inside the run folder: $name"
  content=store/$sha
  [ -f "$content" ] && [ ! -L "$content" ] || refuse 1 "the store does not hold $sha ($name); deploy it again"
  case $mode in
    *755) [ -x "$content" ] || chmod 0755 "$content" || refuse 1 "cannot make $sha executable" ;;
  esac
  case $name in
    */*)
      mkdir -p "$building/${name%/*}" 2>/dev/null || refuse 2 "a file is in the way of $name"
      ;;
  esac
  [ ! -e "$building/$name" ] || refuse 2 "the name is given twice: $name"
  ln -s "$root/$content" "$building/$name" 2>/dev/null || refuse 1 "cannot link $name"
  files=$((files + 1))
  used="$used $sha"
done
mv "$building" "$run" || refuse 1 "cannot make $root/$run"
# Where somebody else has made the run meanwhile, mv moves into it.
if [ -e "$run/${building##*/}" ]; then
  rm -rf "$run/${building##*/}"
  die 1 "the run $2 is there already; clean it up first"
fi
# The mtime of a memo is when the content was last used, for evict.sh; content itself must not change.
# shellcheck disable=SC2086
[ -z "$used" ] || (cd store/.memo && touch -c $used) 2>/dev/null
printf 'run_dir=%s\n' "$root/$run"
echo "qnnfarm-link files=$files"
