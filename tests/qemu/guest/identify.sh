# What the drive says of itself: the admin commands of nvme-cli, each field held to what the host set up.
# Variables: serial, image_bytes, block_size.
# shellcheck shell=dash disable=SC2154

. /guest/nvme.sh

identify_controller() {
  answers id-ctrl nvme id-ctrl /dev/nvme0
  holds "serial number" "$(field sn)" = "$serial"
  holds "model is named" -n "$(field mn)"
  holds "firmware is named" -n "$(field fr)"
  holds "namespaces" "$(field nn)" -ge 1
  holds "entry sizes of the submission queues" $(($(field sqes) & 0xf)) -eq 6
  holds "entry sizes of the completion queues" $(($(field cqes) & 0xf)) -eq 4
  holds "Dataset Management" $(($(field oncs) & 0x4)) -ne 0
  holds "Write Zeroes" $(($(field oncs) & 0x8)) -ne 0
  holds "version 1.3 or later" $(($(field ver))) -ge $((0x10300))
  log_entries=$(($(field elpe) + 1))
}

identify_namespace() {
  answers id-ns nvme id-ns "$drive"
  blocks=$(($(field nsze)))
  in_use=$(grep 'in use' /tmp/answer)
  holds "block size in use" "$in_use" != "${in_use%lbads:"$log2_block_size" *}"
  holds "no metadata" "$in_use" != "${in_use#*ms:0 }"
  holds "size" $((blocks * block_size)) -eq "$image_bytes"
  holds "capacity" $(($(field ncap))) -eq "$blocks"
  holds "utilization" $(($(field nuse))) -le "$blocks"
  holds "size that Linux sees" "$(blockdev --getsize64 "$drive")" -eq "$image_bytes"
  holds "logical block size that Linux sees" "$(blockdev --getss "$drive")" -eq "$block_size"
  holds "discard that Linux sees" "$(cat "/sys/block/${drive#/dev/}/queue/discard_max_bytes")" -gt 0
}

smart_log() {
  answers smart-log nvme smart-log /dev/nvme0
  holds "no critical warning" "$(field critical_warning)" = 0
  kelvin=$(sed -n 's/^temperature.*(\([0-9]*\) *K).*/\1/p' /tmp/answer)
  holds "temperature above 0 degrees Celsius" "${kelvin:-0}" -gt 273
  holds "temperature below 70 degrees Celsius" "${kelvin:-999}" -lt 343
  holds "available spare" "$(field available_spare | tr -d %)" -le 100
  holds "no media error" "$(field media_errors)" = 0
  reads=$(field host_read_commands | tr -d ,)
  dd if="$drive" of=/dev/null bs=4096 count=8 iflag=direct 2>/dev/null
  nvme smart-log /dev/nvme0 >/tmp/answer
  holds "host reads are counted" "$(field host_read_commands | tr -d ,)" -ge $((reads + 8))
}

error_log() {
  answers error-log nvme error-log /dev/nvme0 --log-entries="$log_entries"
  holds "entries of the error log" "$(grep -c '^error_count' /tmp/answer)" -eq "$log_entries"
}

# feature ID [ARGUMENT…]: leaves its current value in `value`.
feature() {
  id=$1
  shift
  answers "get-feature $id" nvme get-feature /dev/nvme0 --feature-id="$id" "$@"
  value=$(sed -n 's/.*[Cc]urrent value: *\([0-9a-fx]*\).*/\1/p' /tmp/answer) # a zero comes without 0x
  holds "feature $id has a value" -n "$value"
  value=$((${value:-0}))
}

features() {
  feature 0x01 # Arbitration
  feature 0x02 # Power Management
  holds "power state" $((value & 0x1f)) -eq 0
  feature 0x04 # Temperature Threshold
  holds "temperature threshold above 0 degrees Celsius" $((value & 0xffff)) -gt 273
  feature 0x05 --namespace-id=1 # Error Recovery
  feature 0x07 # Number of Queues
  holds "I/O submission queues" $(((value & 0xffff) + 1)) -ge 2
  holds "I/O completion queues" $((((value >> 16) & 0xffff) + 1)) -ge 2
  feature 0x08 # Interrupt Coalescing
  feature 0x0a # Write Atomicity
  feature 0x0b # Asynchronous Event Configuration
  check "feature 6 is there exactly when the write cache is" write_cache
}

write_cache() {
  nvme id-ctrl /dev/nvme0 >/tmp/answer
  if [ $(($(field vwc) & 1)) -eq 1 ]; then nvme get-feature /dev/nvme0 --feature-id=0x06; else ! nvme get-feature /dev/nvme0 --feature-id=0x06; fi
}

case $block_size in 512) log2_block_size=9 ;; 4096) log2_block_size=12 ;; esac
identify_controller
identify_namespace
smart_log
error_log
features
