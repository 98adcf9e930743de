# What is durable survives the server; a server survives its clients.
# shellcheck shell=bash

# keeps_what_was_synced DOORBELLS TIMES: the server is killed while a guest writes files and syncs each.
keeps_what_was_synced() {
  local doorbells=$1 times=$2 image=$work/disk.img known=0 round
  truncate -s 256M "$image"
  for ((round = 0; round <= times; round++)); do
    drive_start "$image" 512 "$doorbells"
    guest_start sync "known=$known"
    guest_until checked 120
    [ "$round" -eq 0 ] || check "$scenario: after kill $round all $known synced files are whole" test "${facts[whole]}" -eq "$known"
    guest_go
    if [ "$round" -eq "$times" ]; then break; fi
    for _ in {1..30}; do
      [ "${facts[synced]:-0}" -lt $((known + 10)) ] || break
      guest_for 2
    done
    drive_kill
    # What the guest was still told before the server died counts too.
    guest_for 2
    guest_kill
    check "$scenario: files were synced before kill $((round + 1))" test "${facts[synced]:-0}" -gt "$known"
    known=${facts[synced]:-$known}
  done
  guest_kill
  drive_stop
  figure "$scenario.synced_files_kept" "$known" files -gt 0
}

# serves_the_next DOORBELLS TIMES: QEMU is killed under load, and a new one comes to the same server.
serves_the_next() {
  local doorbells=$1 times=$2 image=$work/disk.img round descriptors mappings
  truncate -s 256M "$image"
  drive_start "$image" 4096 "$doorbells"
  sleep 0.5
  descriptors=$(server_descriptors) mappings=$(server_mappings)
  for ((round = 0; round <= times; round++)); do
    guest_start load "first=$((round == 0))"
    guest_until busy 120
    guest_kill
  done
  settle
  figure "$scenario.kills" "$times" kills
  figure "$scenario.descriptors_left" "$(($(server_descriptors) - descriptors))" descriptors -eq 0
  figure "$scenario.mappings_left" "$(($(server_mappings) - mappings))" mappings -eq 0
  drive_stop
  check "$scenario: e2fsck recovers the image at the end" recovers "$image"
}

# Waits until the server has cleaned up after its last client, at most 5 s.
settle() {
  for _ in {1..50}; do
    [ "$(server_descriptors)" -ne "$descriptors" ] || [ "$(server_mappings)" -ne "$mappings" ] || return 0
    sleep 0.1
  done
}

# 1: errors were corrected, which is what a journal is for.
recovers() { "${from_tree[@]}" "$tree/usr/sbin/e2fsck" -fp "$1" || [ $? -eq 1 ]; }
