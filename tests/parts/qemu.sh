# guests of Debian's cloud kernel in unmodified QEMU 11.1 keep their files on our drive
# shellcheck shell=bash
source "$here/debian/tree.sh"
source "$here/qemu/initramfs.sh"
source "$here/qemu/machine.sh"
source "$here/qemu/drive.sh"
source "$here/qemu/files.sh"
source "$here/qemu/kills.sh"

# scenario NAME COMMAND…: on its own, with a directory that goes with it; nothing that it started outlives it.
scenario() {
  local status scenario=$1 started=$SECONDS failed
  shift
  say "$scenario"
  failed=$(count failed)
  set +e
  (
    set -e
    work=$(mktemp -d) qemu='' server='' drive=()
    trap 'kill -KILL $qemu $server 2>/dev/null || true; wait; rm -rf "$work"' EXIT
    "$@"
  )
  status=$?
  set -e
  [ $status -eq 0 ] || [ "$(count failed)" -gt "$failed" ] || fail "$scenario: ended early (exit code $status)"
  say "$scenario: took $((SECONDS - started)) s"
}

need cargo:cargo cc:gcc || exit
if [ -z "${OUTBOARD_TEST_DEVICE:-}" ]; then
  check "build outboard-server" cargo build --locked --release -p outboard-server
fi
debian_tree
initramfs=$(mktemp)
trap 'rm -f "$initramfs"*' EXIT
guest_initramfs "$initramfs"

for doorbells in mapped posted; do
  for block_size in 512 4096; do
    scenario "files.$doorbells.$block_size" keeps_files $doorbells $block_size
  done
done

# The server killed under fsync'ed writes, QEMU killed under load: the whole counts with --full.
scenario kill_server.posted keeps_what_was_synced posted "$(share 5 2)"
scenario kill_server.mapped keeps_what_was_synced mapped "$(share 5 1)"
scenario kill_qemu.mapped serves_the_next mapped "$(share 20 4)"
scenario kill_qemu.posted serves_the_next posted "$(share 20 1)"
