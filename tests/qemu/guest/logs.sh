# The log pages of docs/nvme.md. The Changed Namespace List is format.sh's.
# shellcheck shell=dash disable=SC2154

# page ID LENGTH [ARGUMENT…]: a part of a log page.
page() {
  id=$1 length=$2
  shift 2
  nvme get-log "$controller" --log-id="$id" --log-len="$length" --raw-binary "$@"
}

error_log() {
  refused "a feature that does not exist" 2 nvme get-feature "$controller" --feature-id=0xc7
  answers error-log nvme error-log "$controller" --log-entries=64
  holds "entries of the error log" "$(grep -c '^error_count' /tmp/answer)" -eq 64
  holds "the newest: its status" "$(field status_field | cut -d ' ' -f 1)" = 0x6002
  holds "the newest: the parameter that was wrong" "$(field parm_err_loc)" = 0x28
  holds "the newest: of the admin queue" "$(field sqid)" = 0
  newest=$(field error_count)
  nvme smart-log "$controller" >/tmp/answer
  holds "as many as SMART counts" "$(field num_err_log_entries)" = "$newest"
  page 1 4096 | dd of=/tmp/part bs=64 skip=3 count=2 iflag=fullblock 2>/dev/null
  check "a part of the page" eval 'page 1 128 --lpo=192 | cmp - /tmp/part'
  refused "a part beyond the end" 2 page 1 64 --lpo=8192
  refused "a log page that does not exist" 109 page 0x0d 64
}

smart_log() {
  nvme smart-log "$controller" >/tmp/answer
  reads=$(field host_read_commands) writes=$(field host_write_commands) units=$(field 'Data Units Read' | cut -d ' ' -f 1)
  dd if="$drive" of=/dev/null bs=256k count=16 iflag=direct 2>/dev/null
  dd if="$drive" of=/tmp/same bs="$block_size" count=8 iflag=direct 2>/dev/null
  dd if=/tmp/same of="$drive" bs="$block_size" count=8 oflag=direct 2>/dev/null
  answers smart-log nvme smart-log "$controller"
  holds "reads are counted" "$(field host_read_commands)" -ge $((reads + 24))
  holds "writes are counted" "$(field host_write_commands)" -ge $((writes + 8))
  # 4 MiB, in thousands of 512 bytes.
  holds "units read are counted" "$(field 'Data Units Read' | cut -d ' ' -f 1)" -ge $((units + 8))
  holds "no critical warning" "$(field critical_warning)" = 0
  set_feature 0x04 300 >/dev/null
  nvme smart-log "$controller" >/tmp/answer
  holds "a critical warning above the threshold" $(($(field critical_warning))) -eq 2
  set_feature 0x04 343 >/dev/null
  nvme smart-log "$controller" >/tmp/answer
  holds "it is over below the threshold" "$(field critical_warning)" = 0
  refused "SMART is the controller's" 2 nvme smart-log "$controller" --namespace-id=1
}

# opcodes: those that are supported, of 256 entries of the Commands Supported and Effects page.
opcodes() { xxd -p -c 4 | awk '/^.[13579bdf]/ { printf "%02x ", NR - 1 }'; }

effects_log() {
  answers effects-log nvme effects-log "$controller"
  holds "Format NVM may change data and namespaces, one at a time" "$(sed -n 's/^ACS128 .*] //p' /tmp/answer)" = 00010007
  page 5 4096 >/tmp/effects
  posted=''
  [ "$doorbells" = mapped ] || posted='7c '
  holds "admin commands" "$(head -c 1024 /tmp/effects | opcodes)" = "00 01 02 04 05 06 08 09 0a 0c ${posted}80 "
  holds "I/O commands" "$(tail -c +1025 /tmp/effects | head -c 1024 | opcodes)" = "00 01 02 04 05 08 09 0c "
}

firmware_log() {
  answers fw-log nvme fw-log "$controller"
  holds "firmware slot" "$(field afi)" = 0x1
  check "its revision" grep -F "($firmware" /tmp/answer
}

error_log
smart_log
effects_log
firmware_log
