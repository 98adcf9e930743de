# The example devices, each under Linux's own driver for it.
# shellcheck shell=bash

# device_start PROGRAM [ARGUMENT…]: sets `drive` and `server`, as drive_start does. What is written to `keyboard` is its
# input; its output is in $work/output.
device_start() {
  local program=$1 socket=$work/device.sock
  shift
  mkfifo "$work/keyboard"
  exec {keyboard}<>"$work/keyboard"
  "target/debug/$program" --socket-path "$socket" "$@" <"$work/keyboard" >"$work/output" 2>"$work/server.log" &
  server=$!
  drive=(-device "{\"driver\":\"vfio-user-pci\",\"socket\":{\"path\":\"$socket\",\"type\":\"unix\"}}")
  await_socket "$socket"
}

# The inputs change every 2 s: see guest/gpio.sh.
gpio_lines() {
  device_start gpio --period 2000
  kernel=$tree/kernels/stable/vmlinuz
  guest_start gpio
  guest_until end 120
  check "$scenario: the card saw its outputs being set" grep -q 'outputs 0001000000001000' "$work/server.log"
  drive_stop
}

# A guest that has no other port: all that is known of it came over this one.
serial_console() {
  device_start serial
  console=$work/output
  say "booting the guest: console"
  machine -append "console=ttyS0,115200 panic=-1 rdinit=/guest/console.sh" &
  qemu=$!
  line_has 'Linux version' 60
  line_has 'console [ttyS0] enabled' 60
  line_has "$prompt" 60

  run_line "echo \$((6 * 7)) answers"
  line_has "echo \$((6 * 7)) answers" 1
  line_has '42 answers' 1
  run_line 'grep ttyS0 /proc/interrupts'
  line_has 'IO-APIC' 1
  run_line 'seq 1 1000'
  check "$scenario: a long output is whole" cmp <(tr -d '\r' <"$work/output" | grep -xE '[0-9]+') <(seq 1 1000)
  type_line 'stty -echo; echo ready; cat >/typed'
  line_has $'ready\r' 10
  seq 1 300 >&"$keyboard"
  printf '\004' >&"$keyboard"
  type_line 'md5sum /typed'
  line_has "$(seq 1 300 | md5sum | cut -c 1-32)" 30
  pass "$scenario: a long input is whole"
  type_line exit
  guest_end $((SECONDS + 30))
  drive_stop
}

prompt='guest# '
prompts() { grep -oF -- "$prompt" "$work/output" | wc -l; }

type_line() { printf '%s\r' "$1" >&"$keyboard"; }

# run_line COMMAND: waits for the prompt that follows it, at most 30 s.
run_line() {
  local before deadline=$((SECONDS + 30))
  before=$(prompts)
  type_line "$1"
  until [ "$(prompts)" -gt "$before" ]; do
    [ $SECONDS -lt "$deadline" ] || { guest_lost "\"$1\" does not end"; return 1; }
    sleep 0.2
  done
}

# line_has TEXT SECONDS: waits until the serial line has brought it.
line_has() {
  local deadline=$((SECONDS + $2))
  until grep -qF -- "$1" "$work/output"; do
    kill -0 "$qemu" 2>/dev/null && [ $SECONDS -lt "$deadline" ] || { guest_lost "no \"$1\" on the line within $2 s"; return 1; }
    sleep 0.2
  done
  pass "$scenario: the line has \"${1%$'\r'}\""
}
