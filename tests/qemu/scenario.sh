# What parts with guests share: what they need before the first, and scenarios.
# shellcheck shell=bash
source "$here/debian/tree.sh"
source "$here/qemu/initramfs.sh"
source "$here/qemu/machine.sh"
source "$here/qemu/drive.sh"

# The server and what guests need.
guests_ready() {
  need cargo:cargo cc:gcc || return
  if [ -z "${OUTBOARD_TEST_DEVICE:-}" ]; then
    check "build outboard-server" cargo build --locked --release -p outboard-server
  fi
  guest_files
}

# The Debian tree and the initramfs.
guest_files() {
  debian_tree
  initramfs=$(mktemp)
  trap 'rm -f "$initramfs"*' EXIT
  guest_initramfs "$initramfs"
}

# scenario NAME COMMAND…: on its own, with a directory that goes with it; nothing that it started outlives it.
# OUTBOARD_TEST_SCENARIOS, a pattern, picks those to run.
scenario() {
  local status scenario=$1 started=$SECONDS failed
  shift
  # shellcheck disable=SC2053
  [[ $scenario == ${OUTBOARD_TEST_SCENARIOS:-*} ]] || { say "$scenario: not picked"; return 0; }
  say "$scenario"
  failed=$(count failed)
  set +e
  (
    set -e
    work=$(mktemp -d) qemu='' server='' drive=() memory=("${shared_memory[@]}") options=(-no-reboot)
    kernel=$tree/kernels/cloud/vmlinuz
    trap 'kill -KILL $qemu $server 2>/dev/null || true; wait; rm -rf "$work"' EXIT
    "$@"
  )
  status=$?
  set -e
  [ $status -eq 0 ] || [ "$(count failed)" -gt "$failed" ] || fail "$scenario: ended early (exit code $status)"
  say "$scenario: took $((SECONDS - started)) s"
}
