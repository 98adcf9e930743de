# One guest in QEMU: start it, follow what it reports (guest/host.sh), let it go on, ask QEMU for things, end it.
# Uses `kernel`, `processor`, `memory` and `options` (QEMU's arguments), which a scenario may change.
# Sets `qemu` (its process), `console` (the kernel's log), `facts` (what the guest told by name).
# shellcheck shell=bash

declare -A facts=()
processor=(-accel "tcg,thread=multi" -cpu max -smp 2)
shared_memory=(-m 512M -machine "memory-backend=memory" -object "memory-backend-memfd,id=memory,size=512M,share=on")

# machine ARGUMENT…: becomes QEMU, with the device under test.
machine() {
  exec "${from_tree[@]}" "$tree/usr/bin/qemu-system-x86_64" -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" \
    -machine q35 "${processor[@]}" "${memory[@]}" -nodefaults -display none "${options[@]}" \
    -kernel "$kernel" -initrd "$initramfs" "${drive[@]}" "$@" >"$work/qemu.log" 2>&1 </dev/null
}

# guest_start SCRIPT [NAME=VALUE…]: boots SCRIPT of guest/ on the drive, with the variables or kernel parameters given.
guest_start() {
  local script=$1
  shift
  facts=() partial='' console=$work/console-$script
  rm -f "$work"/{report,monitor}.{in,out}
  mkfifo "$work"/{report,monitor}.{in,out}
  exec {from_guest}<>"$work/report.out" {to_guest}<>"$work/report.in"
  exec {from_monitor}<>"$work/monitor.out" {to_monitor}<>"$work/monitor.in"
  say "booting the guest: $script"
  machine -serial "file:$console" -serial "pipe:$work/report" -qmp "pipe:$work/monitor" \
    -append "console=ttyS0 panic=-1 loglevel=5 script=$script $*" &
  qemu=$!
  monitor qmp_capabilities
}

# monitor COMMAND [ARGUMENTS]: of QEMU's monitor (QMP), the arguments in JSON; leaves what it says in `line`. False when
# it refuses.
monitor() {
  echo "{\"execute\": \"$1\"${2:+, \"arguments\": $2}}" >&"$to_monitor"
  while IFS= read -r -t 30 -u "$from_monitor" line; do
    case $line in
      '{"return"'*) return ;;
      '{"error"'*) guest_lost "QEMU refuses $*: $line"; return 1 ;;
    esac
  done
  guest_lost "QEMU did not answer $*"
  return 1
}

# monitor_until EVENT SECONDS: of QEMU's; earlier ones are passed over.
monitor_until() {
  local deadline=$((SECONDS + $2)) line
  while [ $SECONDS -lt "$deadline" ]; do
    ! IFS= read -r -t 1 -u "$from_monitor" line || [[ $line != *"\"event\": \"$1\""* ]] || return 0
  done
  guest_lost "QEMU did not tell of $1 within $2 s"
  return 1
}

# guest_until MARK SECONDS: follows the guest until it pauses at MARK (`end`: until it has powered off).
# False, with the console's tail, when that does not happen in time.
guest_until() {
  local mark=$1 deadline=$((SECONDS + $2)) line
  while [ $SECONDS -lt "$deadline" ]; do
    guest_line || { kill -0 "$qemu" 2>/dev/null && continue; guest_lost "QEMU ended while the guest was to reach \"$mark\""; return 1; }
    case $line in
      "pause $mark") return ;;
      end) [ "$mark" = end ] && { guest_end "$deadline"; return; } || { guest_lost "the guest ended before \"$mark\""; return 1; } ;;
      *) guest_says "$line" || { guest_lost "the guest said \"$line\" before \"$mark\""; return 1; } ;;
    esac
  done
  guest_lost "the guest did not reach \"$mark\" within $2 s"
  return 1
}

# guest_for SECONDS: follows the guest for that long, wherever it gets.
guest_for() {
  local deadline=$((SECONDS + $1)) line
  while [ $SECONDS -lt "$deadline" ]; do
    guest_line && guest_says "$line"
  done
  true
}

# The next whole line that the guest reports, into `line`; false when there is none within a second.
guest_line() {
  local part
  if IFS= read -r -t 1 -u "$from_guest" part; then
    line=$partial$part partial=''
  else
    partial+=$part
    return 1
  fi
}

# Takes note of a line; false when it is not one of these.
guest_says() {
  local name value unit comparison bar
  case $1 in
    "step "*) say "    ${1#* }" ;;
    "pass "*) pass "$scenario: ${1#* }" ;;
    "fail "*) fail "$scenario: ${1#* }" ;;
    "fact "*) read -r _ name value <<<"$1" && facts[$name]=$value ;;
    "figure "*) read -r _ name value unit comparison bar <<<"$1" && figure "$name" "$value" "$unit" "$comparison" "$bar" ;;
    *) return 1 ;;
  esac
}

# guest_go [WORD]: which `pause` reads.
guest_go() { echo "${1:-go}" >&"$to_guest"; }

# Waits until the guest has powered off.
guest_end() {
  while kill -0 "$qemu" 2>/dev/null; do
    [ $SECONDS -lt "$1" ] || { guest_lost "the guest did not power off"; return 1; }
    sleep 0.2
  done
  wait "$qemu" || { guest_lost "QEMU ended with exit code $?"; return 1; }
  qemu=''
}

guest_kill() {
  kill -KILL "$qemu" && wait "$qemu" 2>/dev/null || true
  qemu=''
}

guest_lost() {
  fail "$scenario: $1"
  echo "---- the end of QEMU's log and of the guest's console"
  tail -n 5 "$work/qemu.log"
  tail -n 30 "$console"
  echo "----"
}
