# a real drive behind the server: kernel VFIO, an IOMMU and KVM, in a machine that QEMU plays
# shellcheck shell=bash
source "$here/qemu/scenario.sh"
source "$here/rig/rig.sh"

guests_ready || exit
rig_initramfs=$initramfs.rig # goes with the other
rig_initramfs "$rig_initramfs"
iommu=("${intel_iommu[@]}") drives=1 rig_memory=4G
scenario rig.handover on_rig handover 120
scenario rig.inprocess on_rig inprocess 240
