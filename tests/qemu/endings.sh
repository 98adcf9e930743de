# The drive ends its service in every way that a guest knows, and begins again.
# shellcheck shell=bash

# resets DOORBELLS RESETS REBINDS RESCANS: in one boot. The drive is not unplugged: QEMU 11.1 then aborts in
# vfio_user_msix_teardown(), whatever the server (fault 92).
resets() {
  local doorbells=$1 image=$work/disk.img
  local -A after
  truncate -s 256M "$image"
  drive_start "$image" 4096 "$doorbells"
  guest_start resets "resets=$2 rebinds=$3 rescans=$4"
  guest_until end $((120 + 4 * ($2 + $3 + $4)))
  check "$scenario: Linux resets the function" test "${facts[reset_method]%% *}" = flr
  figure "$scenario.resets_under_load" "${facts[resets]}" resets -eq "$2"
  figure "$scenario.rebinds" "${facts[rebinds]}" rebinds -eq "$3"
  figure "$scenario.rescans" "${facts[rescans]}" rescans -eq "$4"
  counters after
  check "$scenario: the server counts the resets" test "${after[resets]}" -ge $(($2 + $3 + $4))
  drive_stop
}

# reboots DOORBELLS TIMES
reboots() {
  local doorbells=$1 times=$2 image=$work/disk.img
  local -A after
  truncate -s 256M "$image"
  "${from_tree[@]}" "$tree/usr/sbin/mkfs.ext4" -q "$image"
  options=()
  drive_start "$image" 512 "$doorbells"
  guest_start reboots "reboots=$times"
  guest_until end $((120 * (times + 1)))
  figure "$scenario.reboots" "${facts[boot]}" reboots -eq "$times"
  if [ -n "$server" ]; then
    counters after
    check "$scenario: QEMU reset the device at each boot" test "${after[messages.device_reset]}" -ge "$times"
  fi
  drive_stop
  check "$scenario: e2fsck finds the image clean" "${from_tree[@]}" "$tree/usr/sbin/e2fsck" -fn "$image"
}

# works DOORBELLS [PARAMETER…]: the drive in a machine as `memory` and the kernel's parameters make it. Leaves `after`.
works() {
  local doorbells=$1 image=$work/disk.img
  shift
  truncate -s 128M "$image"
  drive_start "$image" 4096 "$doorbells"
  guest_start writes fio_mib=4 "$@"
  guest_until end 300
  [ -z "$server" ] || counters after
  drive_stop
  check "$scenario: e2fsck finds the image clean" "${from_tree[@]}" "$tree/usr/sbin/e2fsck" -fn "$image"
}

# pin_only DOORBELLS: Linux without MSI-X.
pin_only() {
  local -A after=()
  works "$1" pci=nomsi
  check "$scenario: interrupts came by the pin" test "${facts[interrupts.IO-APIC]}" -gt 100
  check "$scenario: none came as a message" test "${facts[interrupts.MSI]}" -eq 0
}

# no_descriptors DOORBELLS: a guest's memory that QEMU has no descriptor of.
no_descriptors() {
  local -A after=()
  memory=(-m 512M)
  works "$1"
  [ -n "${after[*]}" ] || return 0
  say "    ${after[messages.dma_read]:-0} DMA_READ and ${after[messages.dma_write]:-0} DMA_WRITE for ${after[ios.total]} I/Os"
  # Commands come many at a time; what each is to write, and each completion, on its own.
  check "$scenario: what was written came by DMA_READ" test "${after[messages.dma_read]:-0}" -gt "${after[ios.write]}"
  check "$scenario: completions and data went by DMA_WRITE" test "${after[messages.dma_write]:-0}" -ge "${after[ios.total]}"
}

# sees_fatal_status SECONDS: CSTS.CFS, as the guest's processor reads it, within that time.
sees_fatal_status() {
  local line deadline=$((SECONDS + $1))
  while [ $SECONDS -lt "$deadline" ]; do
    sleep 0.2
    monitor human-monitor-command '{"command-line": "info pci"}' || return
    [[ $line =~ 1b36:0010.*BAR0:\ 64\ bit\ memory\ at\ (0x[0-9a-f]{1,12})\  ]] || continue
    monitor human-monitor-command "{\"command-line\": \"xp /1xw $((BASH_REMATCH[1] + 0x1c))\"}" || return
    [[ ! $line =~ :\ (0x[0-9a-f]{8}) ]] || [ $((BASH_REMATCH[1] & 2)) -eq 0 ] || return 0
  done
  false
}

# private_memory DOORBELLS: QEMU has mapped the guest's memory privately, and hands over its descriptor all the same.
private_memory() {
  local doorbells=$1 image=$work/disk.img descriptor memfd=''
  local -A after=()
  memory=("${shared_memory[@]/share=on/share=off}")
  truncate -s 128M "$image"
  drive_start "$image" 4096 "$doorbells"
  guest_start dead nvme_core.admin_timeout=5
  for descriptor in "/proc/$qemu/fd"/*; do
    [[ $(readlink "$descriptor") != *memfd:memory-backend* ]] || memfd=$descriptor
  done
  exec {file}<"$memfd"
  check "$scenario: the controller shows a fatal status while the guest boots" sees_fatal_status 60
  guest_until end 200
  check "$scenario: nothing was written to memory that is not the guest's" cmp -n $((512 << 20)) "/proc/self/fd/$file" /dev/zero
  exec {file}<&-
  counters after
  check "$scenario: no command was executed" test "$((${after[commands.admin]} + ${after[ios.total]}))" -eq 0
  check "$scenario: the log says what to do" grep -q 'share=on' "$work/server.log"
  drive_stop
  check "$scenario: nothing was written to the image" cmp -n $((128 << 20)) "$image" /dev/zero
}

# dimm DOORBELLS: memory is plugged and unplugged while the drive is busy, with fio's buffers in it.
dimm() {
  local doorbells=$1 image=$work/disk.img before
  local -A plugged=()
  memory=(-m "512M,slots=1,maxmem=1G" -object "memory-backend-memfd,id=memory,size=512M,share=on"
    -numa "node,nodeid=0,cpus=0-1,memdev=memory" -numa "node,nodeid=1")
  truncate -s 256M "$image"
  drive_start "$image" 4096 "$doorbells"
  guest_start dimm memhp_default_state=online_movable
  guest_until plug 120
  before=$(server_mappings)
  monitor object-add '{"qom-type": "memory-backend-memfd", "id": "new", "size": 268435456, "share": true}'
  monitor device_add '{"driver": "pc-dimm", "id": "dimm", "memdev": "new", "node": 1}'
  guest_go
  guest_until unplug 120
  check "$scenario: the server has mapped the new memory" test "$(server_mappings)" -gt "$before"
  check "$scenario: fio's buffers are in the new memory" test "${facts[before.new]}" -ge 32 -a "${facts[before.old]}" -eq 0
  monitor device_del '{"id": "dimm"}'
  monitor_until DEVICE_DELETED 60
  check "$scenario: the server has let go of the new memory" test "$(server_mappings)" -eq "$before"
  guest_go
  guest_until end 120
  check "$scenario: fio's buffers are in the old memory" test "${facts[after.old]}" -ge 32 -a "${facts[after.new]}" -eq 0
  drive_stop
}
