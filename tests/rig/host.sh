# What the rig's scripts share: its drives, who has them, how a guest comes by one, and guests by turns.
# shellcheck shell=bash

# Prints the addresses of the NVMe drives.
nvme_drives() { grep -lx 0x010802 /sys/bus/pci/devices/*/class | xargs -n 1 dirname | xargs -n 1 basename; }

# driver_of ADDRESS, group_of ADDRESS
driver_of() { basename "$(readlink "/sys/bus/pci/devices/$1/driver")"; }
group_of() { basename "$(readlink "/sys/bus/pci/devices/$1/iommu_group")"; }

# hand_over ADDRESS DRIVER: takes the device from the driver that has it, if any, and gives it to this one.
hand_over() {
  local function=/sys/bus/pci/devices/$1
  [ ! -e "$function/driver" ] || echo "$1" >"$function/driver/unbind"
  echo "$2" >"$function/driver_override"
  echo "$1" >/sys/bus/pci/drivers_probe
  [ "$(driver_of "$1")" = "$2" ]
}

no_dma_fault() { ! dmesg | grep -E 'DMAR:.*(fault|Fault)|AMD-Vi:.*(IO_PAGE_FAULT|Event logged)'; }

# new_guest NAME [MEMORY] [CPUS]: what follows is about this one, which has yet to be given a drive.
new_guest() {
  work=/run/work/$1 qemu='' server='' drive=() options=(-no-reboot)
  mkdir -p "$work"
  guest_memory "${2:-256M}"
  processor=(-accel kvm -cpu host -smp "${3:-1}")
}

guest_memory() {
  memory=(-m "$1" -machine "memory-backend=memory" -object "memory-backend-memfd,id=memory,size=$1,share=on")
}

# The ways by which a guest comes by the drive at ADDRESS: passed through by QEMU itself; by our server (OPTION… are
# its own, and `as` is what it is run with); by our server, with every access a message.
in_process() { drive=(-device "vfio-pci,host=$1"); }
served() {
  local socket=$work/drive.sock
  "${as[@]}" target/release/outboard-server vfio --socket-path "$socket" --device "$@" \
    >"$work/counters" 2>"$work/server.log" </dev/null &
  server=$!
  drive=(-device "{\"driver\":\"vfio-user-pci\",\"id\":\"drive\",\"socket\":{\"path\":\"$socket\",\"type\":\"unix\"}}")
  await_socket "$socket"
}
trapped() { served "$@" --bar-access trap; }
as=()

# put_aside NAME, take_up NAME: of several guests, the functions of machine.sh are about the one taken up.
guest_variables=(work qemu server console from_guest to_guest from_monitor to_monitor)
declare -A aside=()
put_aside() { for variable in "${guest_variables[@]}"; do aside[$1.$variable]=${!variable}; done; }
take_up() {
  for variable in "${guest_variables[@]}"; do printf -v "$variable" %s "${aside[$1.$variable]}"; done
  partial='' facts=()
}

# keep_logs: the rig's files end with it; the host is given what was logged.
keep_logs() { (cd /run/work && find . -type f -size -1M -exec cp --parents {} /mnt/ \;); }
