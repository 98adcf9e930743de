# The baseline: the drive is passed through by QEMU itself, and the guest runs the bug report's fio line.
# shellcheck shell=bash
address=$(nvme_drives | head -n 1)
check "the drive is handed to vfio-pci" hand_over "$address" vfio-pci
in_process "$address"
guest_start rates seconds="$(share 20 4)"
guest_until ready 120
for jobs in 1 4; do
  guest_go $jobs
  guest_until ready 120
  figure "rig.inprocess.jobs$jobs" "${facts[iops]}" IOPS -gt 0
done
guest_go end
guest_until end 60
