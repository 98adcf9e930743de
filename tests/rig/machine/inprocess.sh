# The baseline: the drive is passed through by QEMU itself, and the guest runs the bug report's fio line.
# shellcheck shell=bash
address=$(nvme_drives | head -n 1)
check "the drive is handed to vfio-pci" hand_over "$address" vfio-pci
drive=(-device "vfio-pci,host=$address")
guest_start rates seconds="$(share 20 4)" turns=1
guest_until ready 120
for jobs in 1 4; do
  guest_go
  guest_until "$([ $jobs -eq 4 ] && echo end || echo ready)" 120
  figure "rig.inprocess.jobs$jobs" "${facts[iops.$jobs]}" IOPS -gt 0
done
