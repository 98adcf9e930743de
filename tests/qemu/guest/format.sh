# Format NVM to another block size and back, and the NVM subsystem reset.
# shellcheck shell=dash disable=SC2154

# changed: the Changed Namespace List.
changed() { page 4 4 | xxd -p; }
rescans() { dmesg | grep -c 'rescanning namespaces' || true; }
rescanned() { [ "$(rescans)" -gt "$before" ]; }
# has_blocks SIZE: as the drive says and as Linux sees.
has_blocks() {
  [ "$(blockdev --getss "$drive")" -eq "$1" ] && [ "$(blockdev --getsize64 "$drive")" -eq "$image_bytes" ] &&
    nvme id-ns "$drive" >/tmp/answer && [ $(($(field nsze) * $1)) -eq "$image_bytes" ]
}
is_zero() { dd if="$drive" bs=1M iflag=direct 2>/dev/null | cmp -n "$image_bytes" - /dev/zero; }

formats() {
  refused "an LBA format that does not exist" 10a nvme format "$drive" --namespace-id=1 --lbaf=7 --force
  refused "cryptographic erase" 2 nvme format "$drive" --namespace-id=1 --lbaf="$format" --ses=2 --force
  write 100 8
  nvme write-uncor "$drive" --namespace-id=1 --start-block=50 --block-count=0
  set_feature 0x0b 0
  holds "no namespace has changed" "$(changed)" = 00000000
  check "Format NVM to $new_block_size bytes" nvme format "$drive" --namespace-id=1 --lbaf="$format" --force
  check "Linux sees blocks of $new_block_size bytes" eventually has_blocks "$new_block_size"
  check "it holds zeroes" is_zero
  holds "the namespace has changed" "$(changed)" = 01000000
  holds "that was said" "$(changed)" = 00000000
  old_block_size=$block_size block_size=$new_block_size
  check "Write of such blocks" write 100 8
  check "Read of such blocks" are /tmp/pattern 100 8

  set_feature 0x0b 0x100
  before=$(rescans)
  check "Format NVM, erasing, to $old_block_size bytes" nvme format "$drive" --namespace-id=1 --block-size="$old_block_size" --ses=1 --force
  check "Linux was told" eventually rescanned
  block_size=$old_block_size
  check "Linux sees blocks of $block_size bytes" eventually has_blocks "$block_size"
  check "it holds zeroes" is_zero
}

register() { nvme get-reg "$controller" "$1" | sed -n 's/.*: *//p' | head -n 1; }

subsystem_reset() {
  check "content" write 100 8
  nvme write-uncor "$drive" --namespace-id=1 --start-block=50 --block-count=0
  set_feature 0x01 3
  errors=$(nvme smart-log "$controller" >/tmp/answer && field num_err_log_entries)
  holds "NVM subsystem reset is offered" $(($(register --cap) >> 36 & 1)) -eq 1
  holds "none has occurred" $(($(register --csts))) -eq 1
  check "NVM subsystem reset" nvme subsystem-reset "$controller"
  stopped() { [ $(($(register --csts))) -eq $((0x10)) ]; }
  check "the controller is disabled, and says why" eventually stopped
  holds "so is its configuration" $(($(register --cc))) -eq 0
  # The link of a virtual machine does not go down, which is what Linux waits for.
  check "the driver starts it" nvme reset "$controller"
  holds "which clears why it was disabled" $(($(register --csts))) -eq 1
  check "the content is there" are /tmp/pattern 100 8
  refused "what was uncorrectable is" 281 verify 50 1
  holds "features are at their defaults" "$(value 0x01 0)" = 0x7
  nvme smart-log "$controller" >/tmp/answer
  holds "the logs stay" "$(field num_err_log_entries)" -gt "$errors"
}

formats
subsystem_reset
check "Format NVM of all namespaces" nvme format "$drive" --namespace-id=0xffffffff --lbaf="$((1 - format))" --force
