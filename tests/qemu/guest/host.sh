# The guest's side of what it tells the host, a line each on the second serial port (the host's side: machine.sh).
# shellcheck shell=dash

step() { echo "step $*" >/dev/ttyS1; }
pass() { echo "pass $*" >/dev/ttyS1; }
fail() { echo "fail $*" >/dev/ttyS1; }
fact() { echo "fact $*" >/dev/ttyS1; }

# check WHAT COMMAND…
check() {
  what=$1
  shift
  if "$@" >/tmp/output 2>&1; then
    pass "$what"
  else
    fail "$what (exit code $?: $*)"
    cat /tmp/output
  fi
}

# pause NAME: waits until the host, told that NAME is reached, says to go on.
pause() {
  echo "pause $1" >/dev/ttyS1
  read -r _ </dev/ttyS1
}

# The drive, once its driver has found it.
drive=/dev/nvme0n1
await_drive() {
  tries=0
  until [ -b "$drive" ]; do
    tries=$((tries + 1))
    [ $tries -lt 150 ] || { fail "the drive is there"; return 1; }
    sleep 0.2
  done
  pass "the drive is there"
}

# No complaint of the kernel about the drive or the file system since boot.
kernel_is_content() {
  ! dmesg | grep -E 'I/O error|I/O Error|timeout, |EXT4-fs error|EXT4-fs warning|controller is down|Call Trace'
}
