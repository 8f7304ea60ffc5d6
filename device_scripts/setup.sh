#!/bin/sh
# Prepares the work root of a device and says what the device has.
#   setup.sh WORK_ROOT
# README.md beside this file: arguments, output, exit codes.

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
. "$here/common.sh" || exit 125

[ $# -eq 1 ] || die 2 'usage: setup.sh WORK_ROOT'
case $1 in
  /*) ;;
  *) die 2 "the work root must be an absolute path: $1" ;;
esac
umask 022
for folder in "$1" "$1/store" "$1/runs" "$1/incoming"; do
  if [ -L "$folder" ] && [ "$folder" != "$1" ]; then
    die 1 "$folder is a symbolic link; remove it"
  fi
  mkdir -p "$folder" 2>/dev/null && chmod 0755 "$folder" 2>/dev/null ||
    die 1 "cannot make the folder $folder"
done
cd "$1" 2>/dev/null || die 1 "cannot enter $1"
root=$(pwd -P)

# Both must hold for a runner to start here: a full or a noexec file system is found now, by name.
probe=incoming/probe.$$
trap 'rm -f "$probe" "$probe.link"' EXIT
printf '#!/bin/sh\nexit 42\n' 2>/dev/null >"$probe" || cannot_write "$root"
[ -s "$probe" ] || cannot_write "$root"
chmod 0755 "$probe"
# A script that runs although the file system is mounted noexec would run through its interpreter;
# it is started by path, which the kernel refuses there.
"./$probe" 2>/dev/null
[ $? -eq 42 ] || die 1 "files in $root cannot be executed (mounted noexec?)"
ln -s probe "$probe.link" 2>/dev/null || die 1 "no symbolic links in $root"

for tool in cat chmod df find flock grep ln ls mkdir mv rm rmdir sleep sort stat touch; do
  command -v "$tool" >/dev/null 2>&1 || die 1 "the device has no $tool"
done
sha256 /dev/null >/dev/null 2>&1 || die 1 "the device has no sha256sum or toybox"
# Without these, processes would be left behind and contents in use removed, silently.
printf 'a\000b' | grep -qzF b 2>/dev/null || die 1 "the device's grep has no option -z"
find incoming -maxdepth 0 -mmin -1 >/dev/null 2>&1 || die 1 "the device's find has no option -mmin"

find_free "$root"
has() { # TOOL
  if command -v "$1" >/dev/null 2>&1; then echo 1; else echo 0; fi
}
python=''
if command -v python3 >/dev/null 2>&1; then
  python=$(python3 -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
fi
printf 'work_root=%s\n' "$root"
printf 'free_kb=%s\n' "$free_kb"
printf 'shell=%s\n' "${KSH_VERSION:-${BASH_VERSION:-sh}}"
printf 'toybox=%s\n' "$(toybox --version 2>/dev/null)"
printf 'kernel=%s\n' "$(uname -r -m 2>/dev/null)"
printf 'python3=%s\n' "$python"
printf 'setsid=%s\n' "$(has setsid)"
printf 'getprop=%s\n' "$(has getprop)"
echo 'qnnfarm-setup ok=1'
