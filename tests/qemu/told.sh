# QEMU takes what `outboard-server --print qemu` prints, as a shell does, and finds the drive.
# shellcheck shell=bash

takes_what_is_printed() {
  local socket="$work/a drive's \"socket\", 1" printed
  target/release/outboard-server nvme --socket-path "$socket" --namespace ram:1M 2>"$work/server.log" >/dev/null &
  server=$!
  printed=$(target/release/outboard-server nvme --name data --socket-path "$socket" --namespace ram:1M --print qemu)
  until [ -S "$socket" ]; do kill -0 "$server" || { server_lost "did not start"; return 1; }; sleep 0.1; done
  mkdir "$work/bin"
  {
    echo '#!/bin/bash'
    printf '%q ' exec "${from_tree[@]}" "$tree/usr/bin/qemu-system-x86_64" -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios"
    echo '"$@"'
  } >"$work/bin/qemu-system-x86_64"
  chmod +x "$work/bin/qemu-system-x86_64"
  (PATH=$work/bin:$PATH; eval "$printed -S -nodefaults -display none -monitor stdio" <<<$'info pci\nquit' >"$work/answer" 2>&1)
  check "QEMU has the drive of the printed command" grep -q 'PCI device 1b36:0010' "$work/answer"
  check "under its name" grep -q 'id "data"' "$work/answer"
  drive_stop
}
