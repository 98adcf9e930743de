# What the rig's scripts share: its drives, who has them, and guests by turns.
# shellcheck shell=bash

# Prints the addresses of the NVMe drives.
nvme_drives() { grep -lx 0x010802 /sys/bus/pci/devices/*/class | xargs -n 1 dirname | xargs -n 1 basename; }

# driver_of ADDRESS
driver_of() { basename "$(readlink "/sys/bus/pci/devices/$1/driver")"; }

# hand_over ADDRESS DRIVER: takes the device from the driver that has it, if any, and gives it to this one.
hand_over() {
  local function=/sys/bus/pci/devices/$1
  [ ! -e "$function/driver" ] || echo "$1" >"$function/driver/unbind"
  echo "$2" >"$function/driver_override"
  echo "$1" >/sys/bus/pci/drivers_probe
  [ "$(driver_of "$1")" = "$2" ]
}

no_dma_fault() { ! dmesg | grep -E 'DMAR:.*(fault|Fault)|AMD-Vi:.*(IO_PAGE_FAULT|Event logged)'; }

# put_aside NAME, take_up NAME: of several guests, the functions of machine.sh are about the one taken up.
guest_variables=(work qemu server console from_guest to_guest from_monitor to_monitor)
declare -A aside=()
put_aside() { for variable in "${guest_variables[@]}"; do aside[$1.$variable]=${!variable}; done; }
take_up() {
  for variable in "${guest_variables[@]}"; do printf -v "$variable" %s "${aside[$1.$variable]}"; done
  partial='' facts=()
}
