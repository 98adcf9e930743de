# Files, each made durable before its number is told to the host; until the host ends the drive.
# Variables: known (files that an earlier boot told of), checked first.
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
await_drive
[ "$known" -gt 0 ] || check "mkfs.ext4" /usr/sbin/mkfs.ext4 -q "$drive"
check "mount" mount -t ext4 "$drive" /mnt

content() { i=0; while [ $i -lt 200 ]; do echo "file $1 line $i"; i=$((i + 1)); done; }

number=1 whole=0
while [ $number -le "$known" ]; do
  content $number | cmp -s - "/mnt/file-$number" && whole=$((whole + 1))
  number=$((number + 1))
done
fact whole $whole
pause checked

while content $number >"/mnt/file-$number" && /usr/bin/sync "/mnt/file-$number"; do
  fact synced $number
  number=$((number + 1))
done 2>/dev/null
# The drive is gone: nothing more can be told but that.
pause gone
