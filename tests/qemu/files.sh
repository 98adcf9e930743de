# A guest makes a file system on the drive, and its data is there: in the guest, on the host, and after a second boot.
# shellcheck shell=bash

# keeps_files DOORBELLS BLOCK_SIZE
keeps_files() {
  local doorbells=$1 block_size=$2 image=$work/disk.img bytes=$((256 << 20)) idle=0 number
  local -A written before after
  [ "$doorbells/$block_size" != posted/512 ] || idle=60
  truncate -s "$bytes" "$image"
  drive_start "$image" "$block_size" "$doorbells"
  guest_start files "serial=$serial image_bytes=$bytes block_size=$block_size file_mib=64 fio_mib=16 idle_seconds=$idle"

  guest_until before-fio 120
  [ -z "$server" ] || counters before
  guest_go
  guest_until after-fio 240
  [ -z "$server" ] || { counters after && crossings; }
  guest_go
  [ $idle -eq 0 ] || idle_cost

  punches_holes
  guest_until end 60
  for number in 1 2 3 4; do written[$number]=${facts[sha256.$number]}; done
  drive_stop
  host_reads

  drive_start "$image" "$block_size" "$doorbells"
  guest_start again
  guest_until end 120
  drive_stop
  for number in 1 2 3 4; do
    check "$scenario: file $number at the second boot" test "${facts[sha256.$number]}" = "${written[$number]}"
  done
}

# What fio's I/O cost on the socket.
crossings() {
  local ios=$((${after[ios.total]} - ${before[ios.total]})) messages=$((${after[messages.total]} - ${before[messages.total]}))
  [ "$ios" -ge 8192 ] || { fail "$scenario: only $ios I/Os counted while fio ran"; return 1; }
  say "    $messages messages for $ios I/Os"
  case $doorbells in
    posted) figure "$scenario.messages_per_io" "$(ratio "$messages" "$ios")" messages -lt 0.1 ;;
    mapped | whole-bar) figure "$scenario.messages_per_io" "$(ratio "$messages" "$ios")" messages -eq 0 ;;
  esac
}

# What the server costs while the guest asks nothing of it.
idle_cost() {
  local start
  guest_until before-idle 60
  say "    an idle minute"
  [ -z "$server" ] || start=$(server_cpu)
  guest_go
  guest_until after-idle $((idle + 60))
  [ -z "$server" ] || figure "$scenario.idle_minute" "$(ratio $(($(server_cpu) - start)) 1000000000)" s -lt 0.1
  guest_go
}

# The image's blocks on the host before and after fstrim.
punches_holes() {
  local full
  guest_until big-file-written 120
  full=$(allocated)
  guest_go
  guest_until trimmed 120
  say "    allocated: $full KiB before fstrim, $(allocated) KiB after"
  check "$scenario: fstrim gave back the big file's 64 MiB" test $((full - $(allocated))) -ge $((64 << 10))
  guest_go
}

allocated() { echo $(($(stat -c %b "$image") * $(stat -c %B "$image") / 1024)); }

# The host's own look at the image.
host_reads() {
  check "$scenario: e2fsck finds the image clean" "${from_tree[@]}" "$tree/usr/sbin/e2fsck" -fn "$image"
  for number in 1 2 3 4; do
    "${from_tree[@]}" "$tree/usr/sbin/debugfs" -R "dump /files/$number $work/dump" "$image" 2>/dev/null
    check "$scenario: file $number on the host" test "$(sha256sum "$work/dump" | cut -d ' ' -f 1)" = "${written[$number]}"
  done
}
