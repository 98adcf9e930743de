# The rig: a machine with an IOMMU, NVMe drives and KVM, which this one need not have. QEMU plays it (tests/qemu/machine.sh); it
# runs Debian's kernel of backports, its root is the Debian tree, and the guests, under KVM, are its own.
# shellcheck shell=bash

rig_modules=(9pnet_virtio 9p vfio-pci vfio_iommu_type1 kvm-amd nvme)

# With interrupt remapping; and QEMU's other IOMMU, whose remapping Linux leaves off.
intel_iommu=(-device "intel-iommu,intremap=on")
amd_iommu=(-device "amd-iommu,intremap=on")

# Packs what the rig's kernel starts with: busybox and the modules, in the order they load in (modules/order).
rig_initramfs() {
  local directory release module file
  need cpio:cpio xz:xz-utils || return
  directory=$(mktemp -d)
  mkdir -p "$directory"/{bin,modules}
  cp "$tree/bin/busybox" "$directory/bin/"
  install -m 755 "$here/rig/init" "$directory/init"
  release=$(basename "$(readlink -f "$tree/kernels/backports/modules")")
  for module in "${rig_modules[@]}"; do
    chroot "$tree" modprobe --set-version "$release" --show-depends "$module" | sed -n 's/^insmod \([^ ]*\).*/\1/p'
  done | awk '!seen[$0]++' >"$directory/modules/files"
  while read -r file; do
    module=$(basename "$file" .xz)
    xz -dc "$tree$file" >"$directory/modules/$module"
    echo "$module" >>"$directory/modules/order"
  done <"$directory/modules/files"
  pack "$directory" "$1"
}

# rig_start SCRIPT [NAME=VALUE…]: boots the rig, which runs SCRIPT of machine/. Uses `drives`, `iommu` and `rig_memory`.
rig_start() {
  local number guests=$initramfs initramfs=$rig_initramfs kernel=$tree/kernels/backports/vmlinuz
  memory=(-m "$rig_memory")
  mkdir "$work/shared"
  zcat "$guests" >"$work/shared/initramfs" # unpacked: the rig's guests would take seconds for it
  options=(-no-reboot -machine kernel-irqchip=split "${iommu[@]}"
    -virtfs "local,path=$tree,mount_tag=tree,security_model=none,readonly=on,multidevs=remap"
    -virtfs "local,path=$PWD,mount_tag=checkout,security_model=none,readonly=on,multidevs=remap"
    -virtfs "local,path=$work/shared,mount_tag=shared,security_model=none")
  drive=()
  for ((number = 0; number < drives; number++)); do
    truncate -s 256M "$work/drive$number.img"
    drive+=(-drive "file=$work/drive$number.img,if=none,id=drive$number,format=raw,discard=unmap,aio=io_uring"
      -device "nvme,serial=RIG-$number,drive=drive$number")
  done
  guest_start "$@" "extent=$extent"
}

# on_rig SCRIPT SECONDS [NAME=VALUE…]: the whole of it, a scenario.
on_rig() {
  local script=$1 seconds=$2 failed
  shift 2
  failed=$(count failed)
  rig_start "$script" "$@"
  guest_until end "$seconds"
  [ "$(count failed)" -eq "$failed" ] || rig_logs
}

# What there is to tell why it failed.
rig_logs() {
  local log
  echo "---- the rig's console"
  tail -n 80 "$console"
  find "$work/shared" -mindepth 2 -type f -size +0 | sort | while read -r log; do
    echo "---- ${log#"$work/shared/"}"
    tail -n 20 "$log"
  done
  echo "----"
}
