# The GPIO card as Linux's stock driver and libgpiod's programs see it: lines, levels, edges.
# shellcheck shell=dash
. /guest/host.sh

# The lines' names are those that the driver gives.
has_lines() { gpiodetect | tee /tmp/chips | grep -q '^gpiochip0 .*(32 lines)' && gpioinfo IIN15; }

# levels INPUT…: as one word.
levels() { gpioget --numeric "$@" | tr -d ' '; }

inputs_change() {
  first=$(levels IIN0 IIN1 IIN2 IIN3)
  sleep 3
  second=$(levels IIN0 IIN1 IIN2 IIN3)
  echo "$first, then $second"
  [ "$first" != "$second" ]
}

# IIN0 changes each time, in turns. All inputs are watched: the driver hands an interrupt to each of the 16, and Linux 6.12
# takes one that nobody has asked for yet for the timer's (handle_nested_irq(0), a NULL dereference). So it must not come
# while they are being asked for, either.
edges_come() {
  now=$(levels IIN0)
  while [ "$(levels IIN0)" = "$now" ]; do sleep 0.1; done
  # shellcheck disable=SC2046
  timeout 60 gpiomon --num-events=64 --format='%E %l' --edges=both $(seq 0 15 | sed s/^/IIN/) >/tmp/edges
  grep ' IIN0$' /tmp/edges >/tmp/edges.first
  cat /tmp/edges.first
  [ "$(wc -l </tmp/edges)" -eq 64 ] && [ "$(uniq /tmp/edges.first | wc -l)" -eq 4 ]
}

for module in gpio-regmap gpio-idio-16 gpio-pci-idio-16; do insmod "/modules/$module.ko"; done
check "gpiodetect finds the card, gpioinfo its lines" has_lines
check "gpioget reads inputs that change" inputs_change
check "gpiomon sees edges, each by an interrupt" edges_come
check "gpioset sets an output" gpioset --toggle 0 OUT3=1 OUT12=1
check "the driver has no complaint" sh -c '! dmesg | grep -E "nobody cared|idio.*(fail|error)|Call Trace"'
