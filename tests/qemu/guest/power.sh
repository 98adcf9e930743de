# The machine whose power fails: a server on an image of this disk, and its client (tests/src/bin/numbered-writes.rs).
# Variables: image (a file on /mnt, or the disk), doorbells, known (numbered writes that were durable before the last cut: 0 at
# the first boot), writes (durable, volatile, or none: the last boot), first, last (of those; or the volatile ones before the cut).
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
drive=/dev/vda
insmod /virtio_blk.ko
await_drive
# commit: the file system itself is to flush nothing meanwhile.
if [ "$image" != "$drive" ]; then
  if [ "$known" -eq 0 ]; then
    check "mkfs.ext4" /usr/sbin/mkfs.ext4 -q "$drive"
    check "mount" mount -t ext4 -o commit=300 "$drive" /mnt
    truncate -s 1G "$image"
    /usr/bin/sync
  else
    check "mount" mount -t ext4 -o commit=300 "$drive" /mnt
  fi
fi

socket=/run/drive.sock
outboard-server nvme --socket-path $socket --namespace "file:$image" --doorbells "$doorbells" >/dev/null &
tries=0
until [ -S $socket ]; do
  tries=$((tries + 1))
  [ $tries -lt 100 ] || { fail "the server listens"; break; }
  sleep 0.1
done

fact lost 0
[ "$known" -eq 0 ] || numbered-writes $socket check 1 "$known" >/dev/ttyS1
[ "$writes" != none ] || numbered-writes $socket check "$first" "$last" | sed 's/lost/volatile_lost/' >/dev/ttyS1
pause checked
[ "$writes" = none ] || numbered-writes $socket "$writes" "$first" "$last" >/dev/ttyS1
check "the kernel has no complaint" kernel_is_content
