# Every command, feature and log page of docs/nvme.md that a guest's tools reach.
# shellcheck shell=bash

# obeys_commands DOORBELLS BLOCK_SIZE FORMAT NEW_BLOCK_SIZE: the guest formats the drive to the LBA format FORMAT, and back.
obeys_commands() {
  local doorbells=$1 block_size=$2 image=$work/disk.img bytes=$((64 << 20)) name
  local -A after
  truncate -s "$bytes" "$image"
  drive_start "$image" "$block_size" "$doorbells"
  # Linux uses SGLs where segments are that long on average; nvme-cli reads registers beside the driver.
  guest_start commands nvme.sgl_threshold=4096 iomem=relaxed "doorbells=$doorbells" "serial=$serial" "image_bytes=$bytes" \
    "block_size=$block_size" "format=$3" "new_block_size=$4"
  guest_until end 400
  [ -z "$server" ] || {
    counters after
    for name in compare verify write_uncorrectable write_zeroes dataset_management flush sgl; do
      check "$scenario: the server counts $name" test "${after[ios.$name]}" -gt 0
    done
  }
  drive_stop
  check "$scenario: nothing is left on the image after the last format" cmp -n "$bytes" "$image" /dev/zero
}
