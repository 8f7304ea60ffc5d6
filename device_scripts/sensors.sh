# What a device has to sample: sourced by telemetry.sh, in the root of its sysfs, never run.

max_zones=12

# Adds FILE (relative to the root of sysfs) as the next channel, when it can be read now.
add_channel() { # UNIT NAME FILE
  [ -e "$3" ] || return 1
  if [ ! -r "$3" ]; then
    echo "denied $3"
    return 1
  fi
  value=''
  read -r value rest <"$3"
  case $value in
    '' | *[!0-9-]*)
      echo "silent $3"
      return 1
      ;;
  esac
  echo "channel $channels $1 $2"
  channels=$((channels + 1))
  files="$files $3"
}

safe_word() { # TEXT
  case $1 in '' | *[!A-Za-z0-9._-]*) return 1 ;; esac
  [ "${#1}" -le 60 ]
}

# One clock for all CPUs that share it: the lowest of them names it.
add_cpus() {
  for folder in devices/system/cpu/cpu[0-9]*/cpufreq; do
    [ -d "$folder" ] || continue
    number=${folder#devices/system/cpu/cpu}
    number=${number%/cpufreq}
    valid_number "$number" && [ "${#number}" -le 4 ] || continue
    first=$number
    [ ! -r "$folder/related_cpus" ] || read -r first rest <"$folder/related_cpus"
    [ "$first" = "$number" ] || [ ! -e "devices/system/cpu/cpu$first/cpufreq" ] || continue
    [ "$channels" -lt 16 ] || return 0
    add_channel kHz "cpu_hz:$number" "$folder/scaling_cur_freq" ||
      add_channel kHz "cpu_hz:$number" "$folder/cpuinfo_cur_freq" || continue
    capped="$capped $number"
  done
}

# What the kernel allows: thermal control lowers it.
add_caps() {
  for number in $capped; do
    add_channel kHz "cpu_cap_hz:$number" "devices/system/cpu/cpu$number/cpufreq/scaling_max_freq"
  done
}

add_ddr() {
  add_channel kHz ddr_hz devices/system/cpu/bus_dcvs/DDR/cur_freq && return 0
  for folder in class/devfreq/*; do
    case ${folder##*/} in
      *[!A-Za-z0-9._:,@-]*) ;;
      *ddr* | *DDR* | *dmc* | *mif*) add_channel Hz ddr_hz "$folder/cur_freq" && return 0 ;;
    esac
  done
}

add_gpu() {
  for file in class/kgsl/kgsl-3d0/devfreq/cur_freq class/kgsl/kgsl-3d0/gpuclk; do
    add_channel Hz gpu_hz "$file" && return 0
  done
}

add_battery() {
  for folder in class/power_supply/battery class/power_supply/*; do
    case ${folder##*/} in *[!A-Za-z0-9._-]*) continue ;; esac
    kind=''
    [ ! -r "$folder/type" ] || read -r kind <"$folder/type"
    [ "$kind" = Battery ] || [ "${folder##*/}" = battery ] || continue
    add_channel uA battery_a "$folder/current_now"
    add_channel uV battery_v "$folder/voltage_now"
    battery=$folder
    return 0
  done
}

# The zones that matter most first: a phone has up to a hundred, and the framework lends some to
# what is no temperature at all (battery limits, charge).
list_zones() { # sets zones to words NUMBER:TYPE
  zones=''
  for folder in class/thermal/thermal_zone[0-9]*; do
    number=${folder#class/thermal/thermal_zone}
    valid_number "$number" && [ "${#number}" -le 4 ] || continue
    kind=''
    [ ! -r "$folder/type" ] || read -r kind <"$folder/type"
    safe_word "$kind" || kind=zone$number
    case $kind in
      *bcl* | *vbat* | *ibat* | *vph* | *-lvl[0-9]* | soc | socd | *-step | *-usr | *-lowf) ;;
      *) zones="$zones $number:$kind" ;;
    esac
  done
}

add_zone() { # NUMBER:TYPE
  [ "$zone_count" -lt "$max_zones" ] && [ "$class_count" -lt "$1" ] || return 1
  add_channel mC "temp_c:${2#*:}" "class/thermal/thermal_zone${2%%:*}/temp" || return 1
  zone_count=$((zone_count + 1))
  class_count=$((class_count + 1))
}

add_zones() {
  list_zones
  zone_count=0
  taken=' '
  for class in npu skin cpu gpu ddr battery pmic other; do
    class_count=0
    for zone in $zones; do
      case $class:${zone#*:} in
        npu:*nsp* | npu:*npu* | npu:*cdsp* | npu:*hvx* | npu:*hmx*) most=3 ;;
        skin:*skin* | skin:*shell* | skin:*quiet* | skin:xo*) most=2 ;;
        cpu:*cpu*) most=3 ;;
        gpu:*gpu*) most=1 ;;
        ddr:*ddr*) most=1 ;;
        battery:*batt*) most=1 ;;
        pmic:pm[0-9]* | pmic:pmic*) most=1 ;;
        other:*) most=$max_zones ;;
        *) continue ;;
      esac
      case $taken in *" ${zone%%:*} "*) continue ;; esac
      [ "$class_count" -lt "$most" ] || continue
      taken="$taken${zone%%:*} "
      add_zone "$most" "$zone"
    done
  done
}

own_channel() { # UNIT NAME
  echo "channel $channels $1 $2"
  channels=$((channels + 1))
}

# Prints the channels; sets every, the files that are read for each sample, and in_turn, of which
# some are. The memory of the run follows the former, its peak comes last.
discover() {
  channels=0
  files='' capped='' battery=''
  add_cpus
  add_ddr
  add_gpu
  add_battery
  every=$files
  own_channel pages rss_bytes
  first_in_turn=$channels
  files=''
  add_caps
  add_zones
  in_turn=$files
  peak_channel=$channels
  own_channel kB rss_peak_bytes
}
