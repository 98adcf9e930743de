# The second boot of a drive: the files are there as they were written. They are read past any cache but the drive's.
# shellcheck shell=dash
. /guest/host.sh
await_drive
check "mount" mount -t ext4 -o ro "$drive" /mnt
for number in 1 2 3 4; do
  fact "sha256.$number" "$(sha256sum "/mnt/files/$number" | cut -d ' ' -f 1)"
done
check "umount" umount /mnt
check "the kernel has no complaint" kernel_is_content
