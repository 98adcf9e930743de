//! The GPIO card: what Linux's gpio-pci-idio-16 relies on.

use outboard_vfio_user::client::Client;
use outboard_vfio_user::device::CONFIG;

use crate::program::{Pin, Program, eventually, read, size_bar, write};

const PORTS: u32 = 2;
const ENABLE: u64 = 2;
const STATUS: u64 = 6;

fn start(period: &str) -> Program {
    Program::start(env!("CARGO_BIN_EXE_gpio"), &["--period", period])
}

fn inputs(client: &Client) -> u16 {
    u16::from_le_bytes([read::<1>(client, PORTS, 1)[0], read::<1>(client, PORTS, 5)[0]])
}

fn clear(client: &Client) {
    write(client, PORTS, 1, &[0]);
}

#[test]
fn it_is_the_card_with_eight_ports_at_bar_2() {
    let program = start("1000");
    let client = program.connect();
    assert_eq!(read(&client, CONFIG, 0), [0x4f, 0x49, 0xc8, 0x0d]);
    assert_eq!(size_bar(&client, 2), 0xfff9, "I/O, 8 ports, 16 address bits");
    assert_eq!(read(&client, CONFIG, 0x3d), [1], "INTA#");
    let ports = client.region(PORTS).unwrap();
    assert_eq!(ports.size(), 8);
    program.terminate();
}

#[test]
fn outputs_read_as_they_were_written_until_a_reset() {
    let program = start("1000");
    let client = program.connect();
    write(&client, PORTS, 0, &[0x5a]);
    write(&client, PORTS, 4, &[0xa5]);
    assert_eq!((read(&client, PORTS, 0), read(&client, PORTS, 4)), ([0x5a], [0xa5]));
    client.reset().unwrap();
    assert_eq!((read(&client, PORTS, 0), read(&client, PORTS, 4)), ([0], [0]));
    // The next client finds none of it.
    write(&client, PORTS, 0, &[1]);
    drop(client);
    assert_eq!(read(&program.connect(), PORTS, 0), [0]);
}

#[test]
fn inputs_change_and_interrupt_when_they_are_to() {
    let program = start("5");
    let client = program.connect();
    let pin = Pin::bind(&client);
    let first = inputs(&client);
    eventually("the upper half counts, too", || inputs(&client) > first + 2 && inputs(&client) > 0x100);
    assert!(pin.is_quiet(), "interrupts are disabled at first");
    assert_eq!(read(&client, PORTS, STATUS), [0]);

    let mut before = inputs(&client);
    clear(&client);
    let _: [u8; 1] = read(&client, PORTS, ENABLE);
    for _ in 0..3 {
        pin.interrupts();
        assert_ne!(inputs(&client), before);
        assert_eq!(read::<1>(&client, PORTS, STATUS)[0] & 5, 5, "pending, from inputs 0 to 7");
        // Before the next interrupt is possible.
        before = inputs(&client);
        clear(&client);
        pin.unmask();
    }

    write(&client, PORTS, ENABLE, &[0]);
    clear(&client);
    pin.unmask();
    before = inputs(&client);
    let _ = pin.is_quiet();
    eventually("inputs go on", || inputs(&client) > before + 2);
    assert!(pin.is_quiet(), "disabled");
}
