# The power fails. A guest is the machine that has everything: outboard-server, its image, its client. The guest's own disk has a
# volatile cache (nbdkit's, which keeps writes in memory until they are flushed). QEMU and that disk are killed at once.
# shellcheck shell=bash

# Adds the server, its client and the disk's driver to the initramfs. The disk is a virtio one: QEMU's NVMe drive ignores FUA.
machine_programs() {
  local directory library
  directory=$(mktemp -d)
  mkdir -p "$directory"/usr/{bin,lib/x86_64-linux-gnu}
  for program in outboard-server numbered-writes; do
    strip -o "$directory/usr/bin/$program" "target/release/$program"
    for library in $("${from_tree[@]}" --list "target/release/$program" | grep -o '/[^ ]*[^ :]'); do
      cp -L "$library" "$directory/usr/lib/x86_64-linux-gnu/"
    done
  done
  xz -dc "$tree"/kernels/cloud/modules/kernel/drivers/block/virtio_blk.ko.xz >"$directory/virtio_blk.ko"
  pack "$directory" "$initramfs.machine" && cat "$initramfs.machine" >>"$initramfs"
}

# machine_start [NAME=VALUE…]: with its disk.
machine_start() {
  local socket=$work/disk.sock tries=0
  rm -f "$socket"
  TMPDIR=$work nbdkit --foreground --unix "$socket" --filter=cache file "$work/machine.img" >"$work/nbdkit.log" 2>&1 </dev/null &
  server=$!
  until [ -S "$socket" ]; do
    tries=$((tries + 1))
    kill -0 "$server" && [ $tries -lt 50 ] || { fail "$scenario: nbdkit did not start"; cat "$work/nbdkit.log"; return 1; }
    sleep 0.1
  done
  drive=(-drive "file=nbd+unix:///?socket=$socket,if=none,id=image,format=raw" -device "virtio-blk-pci,drive=image")
  # Mapped and posted by turns.
  guest_start power "image=$image" "doorbells=$([ $((round % 2)) -eq 0 ] && echo posted || echo mapped)" "$@"
}

power_cut() {
  kill -KILL "$qemu" "$server"
  wait "$qemu" "$server" 2>/dev/null || true
  qemu='' server=''
  # What the client was told before the cut counts.
  guest_for 1
}

# told FACT NUMBER SECONDS: waits until the client has told of that many.
told() {
  local deadline=$((SECONDS + $3))
  until [ "${facts[$1]:-0}" -ge "$2" ]; do
    [ $SECONDS -lt "$deadline" ] || { guest_lost "no $2 $1 writes within $3 s"; return 1; }
    guest_for 1
  done
}

# survives_power_cuts IMAGE TIMES: where the server has its image in the machine: a file on its disk, or that disk itself.
# The last cut shows that one can lose something: writes that were complete, but never made durable.
survives_power_cuts() {
  local image=$1 times=$2 known=0 round volatile=512 first
  truncate -s 2G "$work/machine.img"
  for ((round = 1; round <= times; round++)); do
    # More than it can do before the cut.
    machine_goes_on durable $((known + 1)) $((known + 30000))
    told durable $((known + 200)) 120
    sleep "0.$((RANDOM % 1000))"
    power_cut
    known=${facts[durable]}
  done
  # Far from those of which this client was not told any more.
  first=$((known + 1000))
  machine_goes_on volatile "$first" $((first + volatile - 1))
  told completed "$volatile" 120
  power_cut

  machine_start "known=$known" first="$first" last=$((first + volatile - 1)) writes=none
  checked
  guest_go
  guest_until end 60
  drive_kill
  figure "$scenario.durable_kept" "$known" writes -gt 0
  figure "$scenario.unflushed_lost" "${facts[volatile_lost]}" writes -gt 0
}

# machine_goes_on WRITES FIRST LAST: boots the machine, checks what it has to have, and lets it write.
machine_goes_on() {
  machine_start "known=$known" "writes=$1" "first=$2" "last=$3"
  checked
  guest_go
}

checked() {
  guest_until checked 180
  [ "$known" -eq 0 ] || check "$scenario: boot $round has all $known durable writes" test "${facts[lost]}" -eq 0
}
