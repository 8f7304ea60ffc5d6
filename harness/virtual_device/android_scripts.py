"""The device's own commands, as POSIX shell: text with `{places}` for paths, quoted for a shell.

Each does what it says on this device, or exits with "not supported".
"""

from collections.abc import Mapping
from typing import Final

_GETPROP = """\
#!/bin/sh
# getprop [NAME [DEFAULT]]
case ${{1-}} in -*) echo "getprop $*: not supported" >&2; exit 1 ;; esac
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
sys.powerctl=reboot*) echo reboot >{requests} ;;
sys.powerctl=shutdown*) echo shutdown >{requests} ;;
esac
"""

_REBOOT = """\
#!/bin/sh
# reboot [-p]
case ${{1-}} in
'') echo reboot >{requests} ;;
-p) echo shutdown >{requests} ;;
*) echo "reboot: this device has no $1" >&2; exit 1 ;;
esac
"""

_SYNC = """\
#!/bin/sh
# sync [FILE...]: what is written so far, of all files or of these, outlives a power cut
if [ $# -eq 0 ]; then
    : >{state}/synced
    exec rm -f {state}/synced_files
fi
exec python3 -c '
import os, sys
with open(sys.argv[1], "a") as synced:
    for name in sys.argv[2:]:
        try:
            found = os.stat(name)
        except OSError as error:
            sys.exit(f"sync: {{name}}: {{error.strerror}}")
        synced.write(f"{{found.st_ino}} {{found.st_mtime_ns}} {{found.st_size}}\\n")
' {state}/synced_files "$@"
"""

_UPTIME = """\
#!/bin/sh
# uptime: since this device booted, not its host
[ $# -eq 0 ] || {{ echo "uptime $*: not supported" >&2; exit 1; }}
read -r booted <{properties}/ro.runtime.firstboot
seconds=$(($(date +%s) - booted / 1000))
minutes=$((seconds / 60 % 60))
printf ' %s up %d days, %2d:%02d\\n' "$(date +%H:%M:%S)" $((seconds / 86400)) \\
    $((seconds / 3600 % 24)) $minutes
"""

_DUMPSYS = """\
#!/bin/sh
# dumpsys battery | power | thermalservice, with no further arguments
sys={sys}
battery=$sys/class/power_supply/battery
get() {{ value=; read -r value <"$1"; }}
battery() {{
    echo 'Current Battery Service state:'
    if [ ! -d $battery ]; then
        printf '  AC powered: true\\n  USB powered: false\\n  present: false\\n'
        exit
    fi
    plugged=false
    get $sys/class/power_supply/usb/online; [ "$value" = 1 ] && plugged=true
    get $battery/status
    case $value in
    Charging) status=2 ;; Discharging) status=3 ;; Full) status=5 ;; *) status=1 ;;
    esac
    get $battery/health; [ "$value" = Good ] && health=2 || health=3
    get $battery/capacity; level=$value
    get $battery/voltage_now; voltage=$((value / 1000))
    get $battery/temp
    printf '  %s\\n' 'AC powered: false' "USB powered: $plugged" 'Wireless powered: false' \\
        "status: $status" "health: $health" 'present: true' "level: $level" 'scale: 100' \\
        "voltage: $voltage" "temperature: $value" 'technology: Li-ion'
}}
zone() {{
    get $sys/class/thermal/thermal_zone$1/temp
    sign=; [ "$value" -lt 0 ] && sign=- && value=$((0 - value))
    printf '\\tTemperature{{mValue=%s%d.%03d, mType=%d, mName=%s, mStatus=%d}}\\n' "$sign" \\
        $((value / 1000)) $((value % 1000)) "$2" "$3" "$4"
}}
thermalservice() {{
    [ -f $sys/thermal_status ] || {{ echo "Can't find service: thermalservice" >&2; exit 1; }}
    get $sys/thermal_status; status=$value
    printf 'IsStatusOverride: false\\nThermal Status: %d\\n' "$status"
    for heading in 'Cached temperatures:' 'Current temperatures from HAL:'; do
        [ "$heading" = 'Cached temperatures:' ] || printf 'HAL Ready: true\\n'
        echo "$heading"
        zone 0 0 cpuss-0 "$status"
        zone 1 9 nspss-0 "$status"
        zone 2 3 skin-therm 0
        zone 3 2 battery 0
    done
    get $sys/class/thermal/cooling_device0/cur_state
    echo 'Current cooling devices from HAL:'
    printf '\\tCoolingDevice{{mValue=%d, mType=2, mName=cpufreq-cpu0}}\\n' "$value"
}}
power() {{
    awake=Awake; display=ON
    [ -e {state}/asleep ] && awake=Asleep display=OFF
    stay=0
    setting={settings}/global/stay_on_while_plugged_in
    [ -f $setting ] && read -r stay <$setting
    echo 'POWER MANAGER (dumpsys power)'
    printf '  mWakefulness=%s\\n  mStayOnWhilePluggedInSetting=%s\\n' $awake "$stay"
    printf 'Display Power: state=%s\\n' $display
}}
case ${{1-}} in
battery | thermalservice | power)
    [ $# -eq 1 ] || {{ echo "dumpsys $*: not supported" >&2; exit 1; }}
    $1 ;;
*) echo "Can't find service: ${{1-}}" >&2; exit 1 ;;
esac
"""

_SETTINGS = """\
#!/bin/sh
# settings get|put|delete|list NAMESPACE [KEY [VALUE]]
fail() {{ echo "settings: $1" >&2; exit 1; }}
case ${{2-}} in
system | secure | global) folder={settings}/$2 ;;
*) fail "no namespace '${{2-}}'" ;;
esac
mkdir -p "$folder" || exit 1
[ "$1" = list ] || case ${{3-}} in '' | .* | *[!A-Za-z0-9_.:-]*) fail "no key '${{3-}}'" ;; esac
case $1 in
get)
    value=null
    [ -f "$folder/$3" ] && read -r value <"$folder/$3"
    printf '%s\\n' "$value" ;;
put)
    [ $# -eq 4 ] || fail 'put takes a namespace, a key and a value'
    new=$folder/.$3.$$
    printf '%s\\n' "$4" | tr '\\n' ' ' | sed 's/ $//' >"$new" && mv "$new" "$folder/$3" ;;
delete)
    count=0
    [ -f "$folder/$3" ] && rm "$folder/$3" && count=1
    echo "Deleted $count rows" ;;
list)
    for file in "$folder"/*; do
        [ -f "$file" ] || continue
        read -r value <"$file"
        printf '%s=%s\\n' "${{file##*/}}" "$value"
    done ;;
*) echo "settings $*: not supported" >&2; exit 1 ;;
esac
"""

_SVC = """\
#!/bin/sh
# svc power stayon true|false|usb|ac|wireless; svc power reboot|shutdown
case $* in
'power stayon true') value=15 ;;
'power stayon false') value=0 ;;
'power stayon ac') value=1 ;;
'power stayon usb') value=2 ;;
'power stayon wireless') value=4 ;;
'power reboot') exec reboot ;;
'power shutdown') exec reboot -p ;;
*) echo "svc $*: not supported" >&2; exit 1 ;;
esac
settings put global stay_on_while_plugged_in $value || exit
[ $value = 0 ] || rm -f {state}/asleep
"""

_INPUT = """\
#!/bin/sh
# input keyevent POWER | SLEEP | WAKEUP: there is no screen to touch, only the state of being awake
[ "${{1-}}" = keyevent ] && [ $# -eq 2 ] || {{ echo "input $*: not supported" >&2; exit 1; }}
case ${{2#KEYCODE_}} in
26 | POWER) [ -e {state}/asleep ] && rm {state}/asleep || : >{state}/asleep ;;
223 | SLEEP) : >{state}/asleep ;;
224 | WAKEUP) rm -f {state}/asleep ;;
*) echo "input $*: not supported" >&2; exit 1 ;;
esac
"""

_CMD = """\
#!/bin/sh
# cmd power set-fixed-performance-mode-enabled true|false, where heat is modelled
[ -f {sys}/thermal_status ] || {{ echo "cmd $*: not supported" >&2; exit 1; }}
case $* in
'power set-fixed-performance-mode-enabled true') : >{state}/fixed_performance ;;
'power set-fixed-performance-mode-enabled false') rm -f {state}/fixed_performance ;;
*) echo "cmd $*: not supported" >&2; exit 1 ;;
esac
"""

_DF = """\
#!/bin/sh
# df [-k] [-h] [PATH...]: the limit of this device for /data, the host's df for all else
for last; do :; done
limited=
case ${{last-}} in
/data | /data/* | {data} | {data}/*)
    [ -f {state}/storage_kib ] && read -r limited <{state}/storage_kib ;;
esac
if [ -z "$limited" ]; then
    for df in /usr/bin/df /bin/df; do [ -x $df ] && exec $df "$@"; done
    exit 127
fi
used=$(du -sk {data} | cut -f1)
free=$((limited - used)); [ $free -ge 0 ] || free=0
[ $limited -gt 0 ] || limited=1
echo 'Filesystem     1K-blocks     Used Available Use% Mounted on'
printf '%-14s %9d %8d %9d %3d%% %s\\n' /dev/block/data $limited $used $free \\
    $((used * 100 / limited)) /data
"""

SCRIPTS: Final[Mapping[str, str]] = {
    "getprop": _GETPROP,
    "setprop": _SETPROP,
    "reboot": _REBOOT,
    "sync": _SYNC,
    "uptime": _UPTIME,
    "dumpsys": _DUMPSYS,
    "settings": _SETTINGS,
    "svc": _SVC,
    "input": _INPUT,
    "cmd": _CMD,
    "df": _DF,
}
"""Name to text. Places: `properties`, `state`, `settings`, `sys`, `data`, `requests`."""
