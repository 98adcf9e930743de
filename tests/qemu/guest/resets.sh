# Resets under fio; then the drive goes under fio and comes back: unbound and bound, removed and found. Linux' driver
# gives the commands that a reset cut off to the drive again: no program sees an error of it. What goes to a drive that
# is gone fails; what was written before is there when it is back.
# Variables: resets, rebinds, rescans (how many of each).
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
await_drive
address=$(basename "$(readlink -f /sys/class/nvme/nvme0/device)")
function=/sys/bus/pci/devices/$address
driver=/sys/bus/pci/drivers/nvme
fact reset_method "$(cat "$function/reset_method")"

step "$resets resets under fio"
check "fio keeps the drive busy" load
round=0
while [ $round -lt "$resets" ]; do
  # So many more that none of those that the last reset cut off is left: Linux tries a command only so often.
  wanted=$(($(completed) + 64))
  progress() { [ "$(completed)" -ge "$wanted" ] && in_flight 8; }
  eventually progress || break
  echo 1 >"$function/reset" || break
  round=$((round + 1))
done
fact resets $round
check "fio saw no error of $resets resets, and verifies what it wrote" enough
check "the kernel has no complaint" kernel_is_content

# goes_and_comes ROUND COMMAND…: COMMAND makes the drive go, under fio, and come back.
goes_and_comes() {
  yes "round $1 of $2" | head -c 1048576 >/tmp/content
  shift
  dd if=/tmp/content of="$drive" bs=64k oflag=direct conv=fsync 2>/dev/null || return
  load && "$@" || return
  ! wait "$load" || return # it was to end with an error, in its time
  drive_comes && dd if="$drive" bs=64k count=16 iflag=direct 2>/dev/null | cmp -s - /tmp/content
}

gone() { [ ! -e "$1" ]; }
rebind() { echo "$address" >$driver/unbind && gone "$drive" && echo "$address" >$driver/bind; }
rescan() { echo 1 >"$function/remove" && gone "$function" && echo 1 >/sys/bus/pci/rescan; }

# times N WHAT COMMAND
times() {
  round=0
  step "$1 times: $2"
  while [ $round -lt "$1" ] && goes_and_comes $round "$3"; do round=$((round + 1)); done
  if [ $round -eq "$1" ]; then pass "$2, $1 times: its data is there"; else fail "$2: round $round of $1"; fi
  fact "${3}s" $round
}

times "$rebinds" "the driver unbound and bound" rebind
times "$rescans" "the function removed and found again" rescan
check "the kernel has no complaint about the drive" kernel_finds_drive_well
