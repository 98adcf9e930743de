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
    tail -n 20 /tmp/output | sed 's/^/step | /' >/dev/ttyS1
  fi
}

# pause NAME: waits until the host, told that NAME is reached, says to go on; what it said is left in `answer`.
pause() {
  echo "pause $1" >/dev/ttyS1
  read -r answer </dev/ttyS1
}

# The drive, once its driver has found it.
drive=/dev/nvme0n1
await_drive() { check "the drive is there" drive_comes; }
drive_comes() { eventually [ -b "$drive" ]; }

# eventually COMMAND…: false if it is not within 30 s.
eventually() {
  tries=0
  until "$@"; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] || return 1
    sleep 0.1
  done
}

# in_flight: so many I/Os or more of the drive's are under way.
in_flight() { read -r reads writes <"/sys/block/${drive#/dev/}/inflight" && [ $((reads + writes)) -ge "$1" ]; }

# load [OPTION…]: fio writes and verifies on the drive from 128 MiB on, until `enough` or until it fails.
load() {
  fio --name=load --filename="$drive" --offset=128M --size=8M --rw=randrw --bs=4k --iodepth=32 --ioengine=libaio --direct=1 \
    --verify=crc32c --verify_fatal=1 --verify_state_save=0 --time_based --runtime=3600 "$@" >/tmp/fio 2>&1 &
  load=$!
  eventually in_flight 8 || { cat /tmp/fio; return 1; }
}

# enough: ends it; false if it saw an error, or other data than it wrote.
enough() {
  kill -INT "$load" && ! wait "$load" && cat /tmp/fio && grep -q 'terminating on signal 2' /tmp/fio && grep -q 'err= 0' /tmp/fio
}

# completed: how many I/Os of the drive's were completed.
completed() { awk '{ print $1 + $5 }' "/sys/block/${drive#/dev/}/stat"; }

# No complaint of the kernel about the drive or the file system since boot.
kernel_is_content() {
  ! dmesg | grep -E 'I/O error|I/O Error|timeout, |EXT4-fs error|EXT4-fs warning|controller is down|Call Trace'
}
# The same where a drive went under I/O, which then fails.
kernel_finds_drive_well() {
  ! dmesg | grep -E 'timeout, |Device not ready|Removing after|controller is down|Call Trace'
}
