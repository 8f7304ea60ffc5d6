"""The device's own commands in `/system/bin`; all others come from the host.

Small POSIX shell scripts, so that they start fast.
"""

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.virtual.filesystem import DeviceFilesystem

_HOST_PATH = "/usr/local/bin:/usr/bin:/bin"
"""No `sbin`: what administers the host has no business on a device."""

_GETPROP = """\
#!/bin/sh
# getprop [NAME [DEFAULT]]
cd {properties} || exit 1
if [ $# -eq 0 ]; then
    for key in *; do
        read -r value <"$key"
        printf '[%s]: [%s]\\n' "$key" "$value"
    done
    exit 0
fi
value=
case $1 in */* | .*) ;; *) [ -f "$1" ] && read -r value <"$1" ;; esac
printf '%s\\n' "${{value:-${{2-}}}}"
"""

_SETPROP = """\
#!/bin/sh
# setprop NAME VALUE
[ $# -eq 2 ] || {{ echo 'usage: setprop NAME VALUE' >&2; exit 1; }}
cd {properties} || exit 1
fail() {{ echo "setprop: failed to set property '$1' to '$2'" >&2; exit 1; }}
case $1 in '' | .* | *[!A-Za-z0-9_.:@-]*) fail "$@" ;; esac
case $1 in ro.*) [ ! -e "$1" ] || fail "$@" ;; esac
printf '%s\\n' "$2" | tr '\\n' ' ' | sed 's/ $//' >".$1.$$" && mv ".$1.$$" "$1" || fail "$@"
case $1=$2 in
sys.powerctl=reboot*) kill -USR1 {daemon} ;;
sys.powerctl=shutdown*) kill -TERM {daemon} ;;
esac
"""

_REBOOT = """\
#!/bin/sh
# reboot [-p]
case ${{1-}} in
'') kill -USR1 {daemon} ;;
-p) kill -TERM {daemon} ;;
*) echo "reboot: this device has no $1" >&2; exit 1 ;;
esac
"""

_UPTIME = """\
#!/bin/sh
# uptime: since this device booted, not its host
read -r booted <{properties}/ro.runtime.firstboot
seconds=$(($(date +%s) - booted / 1000))
minutes=$((seconds / 60 % 60))
printf ' %s up %d days, %2d:%02d\\n' "$(date +%H:%M:%S)" $((seconds / 86400)) \\
    $((seconds / 3600 % 24)) $minutes
"""

_DUMPSYS = """\
#!/bin/sh
# dumpsys battery: there is none, and nothing else to dump
[ "${{1-}}" = battery ] || {{ echo "Can't find service: ${{1-}}" >&2; exit 1; }}
echo 'Current Battery Service state:'
echo '  AC powered: true'
echo '  USB powered: false'
echo '  present: false'
"""

_DF = """\
#!/bin/sh
# df [-k] [-h] [PATH...]: the limit of this device for /data, the host's df for all else
for last; do :; done
case ${{last-}} in
/data | /data/* | {data} | {data}/*) ;;
*) for df in /usr/bin/df /bin/df; do [ -x $df ] && exec $df "$@"; done; exit 127 ;;
esac
used=$(du -sk {data} | cut -f1)
total={total_kib}
free=$((total - used)); [ $free -ge 0 ] || free=0
echo 'Filesystem     1K-blocks     Used Available Use% Mounted on'
printf '%-14s %9d %8d %9d %3d%% %s\\n' /dev/block/data $total $used $free \\
    $((used * 100 / total)) /data
"""


@dataclass(frozen=True, slots=True)
class Userland:
    """The commands and the environment of a device's shell."""

    filesystem: DeviceFilesystem
    host_name: str
    properties: Path

    def install(self, *, daemon_pid: int, limit_bytes: int | None) -> None:
        """Write the commands anew; `daemon_pid` as the device's shell sees it."""
        folder = self.filesystem.root / "system" / "bin"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        values = {
            "properties": shlex.quote(str(self.properties)),
            "daemon": str(daemon_pid),
            "data": shlex.quote(str(self.filesystem.root / "data")),
            "total_kib": str(max(1, (limit_bytes or 0) // 1024)),
        }
        scripts = {
            "getprop": _GETPROP,
            "setprop": _SETPROP,
            "reboot": _REBOOT,
            "uptime": _UPTIME,
            "dumpsys": _DUMPSYS,
        }
        if limit_bytes is not None:
            scripts["df"] = _DF
        for name, text in scripts.items():
            _write_script(folder / name, text.format_map(values))
        interpreter = shlex.quote(sys.executable)
        _write_script(folder / "python3", f'#!/bin/sh\nexec {interpreter} -s -S "$@"\n')
        (folder / "sh").symlink_to("/bin/sh")
        if toybox := shutil.which("toybox"):
            (folder / "toybox").symlink_to(toybox)

    def environment(self, term: str) -> dict[str, str]:
        """All variables of a shell. Nothing comes from the daemon's own environment."""
        temporary = self.filesystem.temporary
        return {
            "ANDROID_DATA": str(self.filesystem.data),
            "ANDROID_ROOT": self.filesystem.tools.removesuffix("/bin"),
            "HOME": temporary,
            "HOSTNAME": self.host_name,
            "LANG": "C.UTF-8",
            "LOGNAME": "shell",
            "PATH": f"{self.filesystem.tools}:{_HOST_PATH}",
            "SHELL": "/bin/sh",
            "TERM": term,
            "TMPDIR": temporary,
            "USER": "shell",
        }


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
