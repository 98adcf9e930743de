# Linux's stock drivers use the example devices (examples/), in unmodified QEMU 11.1
# shellcheck shell=bash
source "$here/qemu/scenario.sh"
source "$here/qemu/examples.sh"

need cargo:cargo cc:gcc || exit
check "build the examples" cargo build --locked -p outboard-examples
guest_files

scenario gpio gpio_lines
scenario serial serial_console

# What writing a device takes: a file of some hundred lines.
for device in gpio serial; do
  figure "examples.$device.lines" "$(wc -l <"examples/src/bin/$device.rs")" lines -le 140
done
