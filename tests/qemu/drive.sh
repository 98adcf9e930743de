# The drive under test: outboard-server on an image. Sets `drive` (QEMU's arguments for it) and `server` (its process).
# OUTBOARD_TEST_DEVICE=qemu-nvme puts QEMU's own drive in its place, to try these scripts themselves.
# shellcheck shell=bash

serial=OUTBOARD-TEST-1

# drive_start IMAGE BLOCK_SIZE DOORBELLS
drive_start() {
  local socket=$work/drive.sock
  if [ "${OUTBOARD_TEST_DEVICE:-}" = qemu-nvme ]; then
    drive=(-drive "file=$1,if=none,id=image,format=raw,discard=unmap"
      -device "nvme,serial=$serial,drive=image,logical_block_size=$2,physical_block_size=$2")
    return
  fi
  target/release/outboard-server nvme --socket-path "$socket" --namespace "file:$1,block-size=$2" \
    --doorbells "$3" --serial "$serial" >"$work/counters" 2>"$work/server.log" </dev/null &
  server=$!
  drive=(-device "{\"driver\":\"vfio-user-pci\",\"socket\":{\"path\":\"$socket\",\"type\":\"unix\"}}")
  await_socket "$socket"
}

# await_socket PATH: until the server listens there, at most 5 s.
await_socket() {
  local tries=0
  until [ -S "$1" ]; do
    tries=$((tries + 1))
    kill -0 "$server" && [ $tries -lt 50 ] || { server_lost "did not start"; return 1; }
    sleep 0.1
  done
}

# Ends the server as an operator does; false when it does not end well.
drive_stop() {
  [ -n "$server" ] || return 0
  local tries=0
  kill -TERM "$server" || { server_lost "had ended before it was told to"; return 1; }
  while kill -0 "$server" 2>/dev/null; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || { server_lost "did not end within 10 s of SIGTERM"; return 1; }
    sleep 0.1
  done
  wait "$server" || { server_lost "ended with exit code $?"; return 1; }
  server=''
}

drive_kill() {
  kill -KILL "$server" && wait "$server" 2>/dev/null || true
  server=''
}

server_lost() {
  fail "$scenario: the server $1"
  tail -n 20 "$work/server.log"
}

# counters NAME: the server's counters as they stand, into the associative array NAME.
counters() {
  local -n into=$1
  local old new name value
  old=$(stat -c %s "$work/counters")
  new=$old
  kill -USR1 "$server"
  for _ in {1..50}; do
    sleep 0.1
    if [ "$(stat -c %s "$work/counters")" -eq "$new" ]; then
      [ "$new" -eq "$old" ] || break
    else
      new=$(stat -c %s "$work/counters")
    fi
  done
  [ "$new" -gt "$old" ] || { server_lost "printed no counters on SIGUSR1"; return 1; }
  into=()
  while read -r _ name value; do into[$name]=$value; done < <(tail -c "+$((old + 1))" "$work/counters" | grep '^counter ')
}

# What the server has used of the processors, in nanoseconds. Its threads may come and go; those that left are not in it.
server_cpu() { cat "/proc/$server"/task/*/schedstat | awk '{ sum += $1 } END { printf "%.0f", sum }'; }

server_descriptors() { find "/proc/$server/fd" -mindepth 1 | wc -l; }
# Of files, as a client's memory is; what the allocator and threads' stacks have comes and goes.
server_mappings() { awk '$5 != 0' "/proc/$server/maps" | wc -l; }
