# A file system, files, fio with verification, a second mount: all that was written is there.
# Variables: fio_mib.
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
await_drive
check "mkfs.ext4" /usr/sbin/mkfs.ext4 -q "$drive"
check "mount" mount -t ext4 "$drive" /mnt
head -c 4194304 /dev/urandom >/mnt/file
sum=$(sha256sum </mnt/file)
check "fio verifies all that it wrote" fio --name=verify --directory=/mnt --size="${fio_mib}M" --numjobs=2 --rw=randrw --bs=4k \
  --iodepth=32 --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1
check "umount" umount /mnt
check "mount again" mount -t ext4 -o ro "$drive" /mnt
check "the file is as it was written" test "$(sha256sum </mnt/file)" = "$sum"
check "umount again" umount /mnt
for kind in IO-APIC MSI; do
  fact "interrupts.$kind" "$(awk "/nvme/ && /$kind/ { sum += \$2 + \$3 } END { print sum + 0 }" /proc/interrupts)"
done
check "the kernel has no complaint" kernel_is_content
