# A drive is handed over and taken back by the commands that `vfio list` prints.
# shellcheck shell=bash
outboard() { target/release/outboard-server vfio "$@"; }
# says PATTERN ARGUMENT…: a line of what it says, with success or without.
says() {
  local wanted=$1 said
  shift
  said=$(outboard "$@" 2>&1) || true
  echo "$said"
  grep -Eq -- "$wanted" <<<"$said"
}
address=$(nvme_drives | head -n 1)
group=$(basename "$(readlink "/sys/bus/pci/devices/$address/iommu_group")")

check "list: the drive is the kernel's" says "^$address +010802 +1b36:0010 +nvme +$group +-$" list
mkswap -q /dev/nvme0n1
swapon /dev/nvme0n1
check "bind: not while the machine swaps to it" says "is in use by this machine: /dev/nvme0n1 is swap space" bind "$address"
check "bind: then nothing was touched" test "$(driver_of "$address")" = nvme
swapoff /dev/nvme0n1
check "bind" says "^$address is in the hands of vfio-pci. /dev/vfio/$group is its group" bind "$address"
check "bind: vfio-pci has it" test "$(driver_of "$address")" = vfio-pci
check "bind: again does nothing" outboard bind "$address"
check "list: it can be served" says "^$address can be served" list
sleep 1000 9<>"/dev/vfio/$group" &
holder=$!
check "unbind: says who holds the group" says "$address is held by process $holder \(sleep" unbind "$address"
check "unbind: and did nothing" test "$(driver_of "$address")" = vfio-pci
kill $holder
wait $holder || true
check "unbind" says "^$address is driven by nvme" unbind "$address"
check "unbind: the kernel uses the drive" dd if=/dev/nvme0n1 of=/dev/null bs=4k count=1 status=none
check "unbind: not twice" says "is driven by nvme, not by vfio-pci" unbind "$address"
