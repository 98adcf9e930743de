# A whole Debian in QEMU, started by firmware, and its serial line, which is talked to as a person would.
# Sets `qemu` (its process) and `console` (what came over the line).
# shellcheck shell=bash

# system_start FIRMWARE: from the drive, by `ovmf` or `seabios`.
system_start() {
  local firmware=()
  if [ "$1" = ovmf ]; then
    cp "$disk/OVMF_VARS_4M.fd" "$work/variables"
    firmware=(-drive "if=pflash,unit=0,format=raw,readonly=on,file=$disk/OVMF_CODE_4M.fd"
      -drive "if=pflash,unit=1,format=raw,file=$work/variables")
  fi
  console=$work/console unread=''
  mkfifo "$work"/line.{in,out}
  exec {from_system}<>"$work/line.out" {to_system}<>"$work/line.in"
  "${from_tree[@]}" "$tree/usr/bin/qemu-system-x86_64" -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" \
    -accel tcg,thread=multi -machine q35 -cpu max -smp 2 "${memory[@]}" "${firmware[@]}" -nodefaults -display none \
    -serial "pipe:$work/line" "${drive[@]}" >"$work/qemu.log" 2>&1 </dev/null &
  qemu=$!
}

# expect PATTERN SECONDS: reads the line until it matches the extended regular expression, whose match is left in `match`.
# False, with the line's tail, when it does not in time.
expect() {
  local deadline=$((SECONDS + $2)) part
  until [[ $unread =~ $1 ]]; do
    [ $SECONDS -lt "$deadline" ] || { system_lost "no \"$1\" on the serial line within $2 s"; return 1; }
    kill -0 "$qemu" 2>/dev/null || { system_lost "QEMU ended before \"$1\" came over the serial line"; return 1; }
    IFS= read -r -d '' -n 4096 -t 1 -u "$from_system" part || true
    printf %s "$part" >>"$console"
    unread+=$part
  done
  match=${BASH_REMATCH[0]}
  unread=${unread#*"$match"}
}

answer() { printf '%s\n' "$1" >&"$to_system"; }

log_in() {
  answer root
  expect 'Password: ' 60
  answer outboard
  expect '# ' 120
  # The kernel's messages would get in between; they are looked at with dmesg.
  system_check "a shell" 'dmesg --console-off; stty -echo; PS1='
}

# system_check WHAT COMMAND [SECONDS]: in the shell; what it prints is left in `output`.
system_check() {
  answer "$2; echo \"status\" \$?"
  expect 'status [0-9]+' "${3:-60}"
  if [ "$match" = "status 0" ]; then pass "$scenario: $1"; else fail "$scenario: $1 ($match of $2)"; tail -n 20 "$console"; fi
}

# Powers it off from the shell.
system_end() {
  local deadline=$((SECONDS + 180))
  answer poweroff
  while kill -0 "$qemu" 2>/dev/null; do
    [ $SECONDS -lt "$deadline" ] || { system_lost "the system did not power off"; return 1; }
    IFS= read -r -d '' -n 4096 -t 1 -u "$from_system" part || true
    printf %s "$part" >>"$console"
  done
  wait "$qemu" || { system_lost "QEMU ended with exit code $?"; return 1; }
  qemu=''
}

system_lost() {
  fail "$scenario: $1"
  echo "---- the end of QEMU's log and of the serial line"
  tail -n 5 "$work/qemu.log"
  tail -n 30 "$console"
  echo "----"
}
