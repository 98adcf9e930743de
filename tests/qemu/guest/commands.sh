# Every command, feature and log page of docs/nvme.md that nvme-cli reaches: what each answers and what it does.
# Variables: doorbells, serial, image_bytes, block_size, format, new_block_size.
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
. /guest/nvme.sh
await_drive
controller=/dev/nvme0

identify() {
  answers id-ctrl nvme id-ctrl "$controller"
  model=$(field mn) firmware=$(field fr)
  holds "serial number" "$(field sn)" = "$serial"
  holds "Linux names the model" "$(sed 's/ *$//' /sys/class/nvme/nvme0/model)" = "$model"
  holds "Linux names the subsystem" "$(cat /sys/class/nvme/nvme0/subsysnqn)" = "$(field subnqn)"
  holds "optional admin commands" $(($(field oacs))) -eq $((0x2 | ($([ "$doorbells" = posted ] && echo 1 || echo 0) << 8)))
  holds "optional I/O commands" $(($(field oncs))) -eq $((0xdf))
  holds "SGLs" $(($(field sgls) & 0x3)) -eq 1
  nvme id-ns "$drive" --raw-binary >/tmp/namespace
  nvme admin-passthru "$controller" --opcode=6 --namespace-id=1 --cdw10=0x11 --read --data-len=4096 --raw-binary >/tmp/allocated
  check "an allocated namespace is as an active one" cmp /tmp/allocated /tmp/namespace
  answers "list-ns" nvme list-ns "$controller"
  holds "active namespaces" "$(grep -c '0x1$' /tmp/answer)" -eq 1
  answers "list-ns --all" nvme list-ns "$controller" --all
  holds "allocated namespaces" "$(grep -c '0x1$' /tmp/answer)" -eq 1
  answers ns-descs nvme ns-descs "$drive"
  holds "UUID of the namespace" "$(field uuid | grep -cE '^[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$')" -eq 1
  refused "a namespace that does not exist" b nvme id-ns "$controller" --namespace-id=2
  refused "Identify of a kind that does not exist" 2 nvme admin-passthru "$controller" --opcode=6 --cdw10=0x55 --read --data-len=4096
}

unknown_commands() {
  for opcode in 0x0d 0x10 0x11 0x14 0x15 0x18 0x19 0x1a 0x1c 0x1d 0x1e 0x81 0x82 0x84 0x86 0xc0; do
    refused "admin opcode $opcode" 1 nvme admin-passthru "$controller" --opcode=$opcode
  done
  for opcode in 0x0d 0x0e 0x11 0x15 0x19 0x80; do
    refused "I/O opcode $opcode" 1 nvme io-passthru "$drive" --opcode=$opcode --namespace-id=1
  done
  answers abort nvme admin-passthru "$controller" --opcode=8 --cdw10=0x77770000
  holds "there is nothing to abort" $(($(result))) -eq 1
}

# blocks FIRST COUNT: what a read through the block layer brings.
blocks() { dd if="$drive" bs="$block_size" skip="$1" count="$2" iflag=direct 2>/dev/null; }
# are FILE FIRST COUNT: the blocks are those of the file.
are() { blocks "$2" "$3" | cmp -n $(($3 * block_size)) - "$1"; }
are_zero() { blocks "$1" "$2" | cmp -n $(($2 * block_size)) - /dev/zero; }
# write FIRST COUNT: new content, which is left in /tmp/pattern.
write() {
  head -c $(($2 * block_size)) /dev/urandom >/tmp/pattern
  nvme write "$drive" --start-block="$1" --block-count=$(($2 - 1)) --data-size=$(($2 * block_size)) --data=/tmp/pattern
}
compare() { nvme compare "$drive" --start-block="$1" --block-count=$(($2 - 1)) --data-size=$(($2 * block_size)) --data="$3"; }
verify() { nvme verify "$drive" --namespace-id=1 --start-block="$1" --block-count=$(($2 - 1)); }
media_errors() { nvme smart-log "$controller" >/tmp/answer && field media_errors; }

data() {
  check "Write" write 100 8
  check "Read" are /tmp/pattern 100 8
  check "Compare of the same" compare 100 8 /tmp/pattern
  head -c $((8 * block_size - 1)) /tmp/pattern >/tmp/other
  tail -c 1 /tmp/pattern | tr '\000-\377' '\001-\377\000' >>/tmp/other
  refused "Compare of what differs in the last byte" 285 compare 100 8 /tmp/other
  check "Verify" verify 100 8
  refused "Verify beyond the end" 80 verify $((image_bytes / block_size - 1)) 2
  check "Flush" nvme flush "$drive" --namespace-id=1
}

uncorrectable() {
  before=$(media_errors)
  check "Write Uncorrectable" nvme write-uncor "$drive" --namespace-id=1 --start-block=102 --block-count=1
  refused "Read of such a block" 281 nvme read "$drive" --start-block=102 --block-count=0 --data-size="$block_size" --data=/tmp/read
  answers error-log nvme error-log "$controller" --log-entries=1
  holds "the error log has it" "$(field status_field | cut -d ' ' -f 1):$(($(field lba))):$(($(field nsid)))" = 0x2281:102:1
  refused "Read that ends in such a block" 281 nvme read "$drive" --start-block=100 --block-count=2 --data-size=$((3 * block_size)) --data=/tmp/read
  refused "Verify of such a block" 281 verify 103 1
  refused "Compare of such a block" 281 compare 102 1 /tmp/pattern
  check "a program cannot read it" eval '! blocks 102 1'
  holds "media errors are counted" "$(media_errors)" -ge $((before + 5))
  check "the blocks before it are there" are /tmp/pattern 100 2
  dd if=/tmp/pattern bs="$block_size" skip=4 count=4 2>/dev/null >/tmp/rest
  check "the blocks behind it are there" are /tmp/rest 104 4
  dd if=/tmp/rest of="$drive" bs="$block_size" seek=102 count=1 oflag=direct 2>/dev/null
  check "one that is written is there again" are /tmp/rest 102 1
  refused "the other is not" 281 verify 103 1
  check "Write Zeroes" nvme write-zeroes "$drive" --namespace-id=1 --start-block=103 --block-count=0
  check "one that is zeroed is there again" are_zero 103 1
}

zeroes() {
  write 200 32
  check "Write Zeroes of some blocks" nvme write-zeroes "$drive" --namespace-id=1 --start-block=201 --block-count=1
  check "Write Zeroes that deallocates" nvme write-zeroes "$drive" --namespace-id=1 --start-block=203 --block-count=12 --deac
  for range in 201:2 203:13; do check "blocks $range are zero" are_zero ${range%:*} ${range#*:}; done
  check "the block before is there" are /tmp/pattern 200 1
  dd if=/tmp/pattern bs="$block_size" skip=16 2>/dev/null >/tmp/rest
  check "the blocks behind are there" are /tmp/rest 216 16

  write 300 32
  nvme id-ns "$drive" >/tmp/answer
  holds "what is deallocated reads as zeroes" $(($(field dlfeat) & 0x7)) -eq 1
  refused "Deallocate of ranges one of which is beyond the end" 80 \
    nvme dsm "$drive" --namespace-id=1 --ad --slbs=300,$((image_bytes / block_size)) --blocks=8,1
  check "nothing of it was done" are /tmp/pattern 300 32
  check "a hint" nvme dsm "$drive" --namespace-id=1 --idr --slbs=300 --blocks=8
  check "it has no effect" are /tmp/pattern 300 32
  check "Deallocate" nvme dsm "$drive" --namespace-id=1 --ad --slbs=301,310 --blocks=3,6
  for range in 301:3 310:6; do check "blocks $range are zero" are_zero ${range%:*} ${range#*:}; done
  check "the block before is there" are /tmp/pattern 300 1
  dd if=/tmp/pattern bs="$block_size" skip=16 2>/dev/null >/tmp/rest
  check "the blocks behind are there" are /tmp/rest 316 16
}

# Many segments in one command.
lists() {
  head -c 4194304 /dev/urandom >/tmp/content
  dd if=/tmp/content of="$drive" bs=1M seek=16 oflag=direct 2>/dev/null
  check "what was written with SGLs is read with SGLs" eval 'dd if="$drive" bs=1M skip=16 count=4 iflag=direct 2>/dev/null | cmp - /tmp/content'
}

identify
unknown_commands
data
uncorrectable
zeroes
lists
. /guest/features.sh
. /guest/logs.sh
. /guest/format.sh
check "the kernel has no complaint but of what was uncorrectable" eval '! dmesg | grep -E "timeout, |Device not ready|Removing after|controller is down|Call Trace"'
