//! The serial port: what Linux's 8250 driver relies on.

use std::io::Write;

use outboard_vfio_user::client::Client;
use outboard_vfio_user::device::CONFIG;

use crate::program::{Pin, Program, eventually, read, size_bar, write};

const PORTS: u32 = 0;
const DATA: u64 = 0;
const INTERRUPT_ENABLE: u64 = 1;
const INTERRUPT_IDENTIFICATION: u64 = 2;
const LINE_STATUS: u64 = 5;

fn start() -> Program {
    Program::start(env!("CARGO_BIN_EXE_serial"), &[])
}

fn register(client: &Client, port: u64) -> u8 {
    read::<1>(client, PORTS, port)[0]
}

/// What has been received; as a driver's interrupt handler takes it.
fn receive(client: &Client, into: &mut Vec<u8>) {
    while register(client, LINE_STATUS) & 1 != 0 {
        into.push(register(client, DATA));
    }
}

#[test]
fn it_is_a_16550_with_eight_ports_at_bar_0() {
    let program = start();
    let client = program.connect();
    assert_eq!(read(&client, CONFIG, 0), [0x36, 0x1b, 0x02, 0x00]);
    assert_eq!(read(&client, CONFIG, 9), [0x02, 0x00, 0x07]);
    assert_eq!(size_bar(&client, 0), 0xfff9, "I/O, 8 ports, 16 address bits");
    assert_eq!(read(&client, CONFIG, 0x3d), [1], "INTA#");
    assert_eq!(register(&client, INTERRUPT_IDENTIFICATION), 0xc1, "FIFOs, and nothing pending");
    program.terminate();
}

#[test]
fn what_is_sent_is_printed() {
    let program = start();
    let client = program.connect();
    let text: String = (0..200).map(|line| format!("line {line}\n")).collect();
    for byte in text.bytes() {
        assert_eq!(register(&client, LINE_STATUS) & 0x20, 0x20, "there is room for another byte");
        write(&client, PORTS, DATA, &[byte]);
    }
    eventually("all of it", || program.output() == text);
}

/// More than the FIFO holds, while the driver takes it at its own pace.
#[test]
fn what_is_typed_is_received_and_none_of_it_is_lost() {
    let mut program = start();
    let client = program.connect();
    let pin = Pin::bind(&client);
    write(&client, PORTS, INTERRUPT_ENABLE, &[1]);
    let text: String = (0..300).map(|number| format!("{number},")).collect();
    program.input().write_all(text.as_bytes()).unwrap();
    let mut received = Vec::new();
    while received.len() < text.len() {
        pin.interrupts();
        assert_eq!(register(&client, INTERRUPT_IDENTIFICATION) & 0xf, 4, "received data available");
        receive(&client, &mut received);
        pin.unmask();
    }
    assert_eq!(String::from_utf8(received).unwrap(), text);
}

#[test]
fn the_pin_is_asserted_while_an_enabled_interrupt_is_pending() {
    let mut program = start();
    let client = program.connect();
    let pin = Pin::bind(&client);
    program.input().write_all(b"x").unwrap();
    eventually("it is received", || register(&client, LINE_STATUS) & 1 == 1);
    assert!(pin.is_quiet(), "not enabled");
    write(&client, PORTS, INTERRUPT_ENABLE, &[1]);
    pin.interrupts();
    // Disabled, so the pin falls: unmasking brings no other.
    write(&client, PORTS, INTERRUPT_ENABLE, &[0]);
    pin.unmask();
    assert!(pin.is_quiet());
    write(&client, PORTS, INTERRUPT_ENABLE, &[1]);
    pin.interrupts();
    assert_eq!(register(&client, DATA), b'x');
    pin.unmask();
    assert!(pin.is_quiet());
    // Transmitter Holding Register Empty.
    write(&client, PORTS, INTERRUPT_ENABLE, &[2]);
    pin.interrupts();
    assert_eq!(register(&client, INTERRUPT_IDENTIFICATION) & 0xf, 2);
    pin.unmask();
    assert!(pin.is_quiet());
}

#[test]
fn a_reset_brings_the_initial_registers_back() {
    let program = start();
    let client = program.connect();
    write(&client, PORTS, 7, &[0x5a]);
    write(&client, PORTS, INTERRUPT_ENABLE, &[0xf]);
    client.reset().unwrap();
    assert_eq!((register(&client, 7), register(&client, INTERRUPT_ENABLE)), (0, 0));
}
