# format, lints, documentation, unit and property tests, loom models, the lock
# shellcheck shell=bash

need cargo:cargo cc:gcc shellcheck:shellcheck git:git || exit

# loom_models: every interleaving of the DMA table's users, in a build of its own.
loom_models() {
  local log=$outcomes/loom.log
  RUSTFLAGS="--cfg loom" cargo test --locked --release -p outboard-vfio-user --test loom --target-dir target/loom 2>&1 | tee "$log"
  # A build without models would pass, too.
  grep -qE '^test result: ok\. [1-9][0-9]* passed' "$log"
}

# One version of each rust-vmm crate: two would mean two incompatible kinds of guest memory.
rust_vmm_once() {
  local twice
  twice=$(sed -n 's/^name = "\(vm-memory\|vmm-sys-util\|vfio-bindings\|vfio-ioctls\|kvm-bindings\|kvm-ioctls\|vm-fdt\|vm-superio\|linux-loader\|acpi_tables\)"$/\1/p' Cargo.lock | sort | uniq -d)
  [ -z "$twice" ] || { echo "more than once in Cargo.lock: $twice"; return 1; }
}

# Which registry serves a package is the machine's business: no URL of one, be it the machine's own or of a usual name.
no_registry_hosts() {
  local own usual='(crates|deb|files|ftp|index|mirrors?|npm|pypi|registry|security|static)'
  own=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | sed -nE 's|^[^/]*//([^/]+).*|\1|p' | sort -u)
  ! git grep -nIE "://${usual}[.-][a-z]" && { [ -z "$own" ] || ! git grep -nIF "$own"; }
}

check "formatting" cargo fmt --all --check
check "lints" cargo clippy --locked --quiet --workspace --all-targets -- -D warnings
check "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --locked --quiet --workspace --no-deps --document-private-items
check "unit and property tests" cargo test --locked --quiet --workspace --no-fail-fast
check "disks on loop devices" cargo test --locked --quiet -p outboard-server --lib -- --ignored
check "loom models of the DMA table" loom_models
check "each rust-vmm crate once in the lock" rust_vmm_once
check "no registry is named" no_registry_hosts
mapfile -t scripts < <(git ls-files '*.sh' tests/run tests/debian/{recipe,disk} tests/{qemu/guest,rig}/init .ci/run)
check "scripts" shellcheck "${scripts[@]}"
