//! A 16550 UART on PCI, QEMU's `pci-serial`, as Linux's `8250_pci` drives it. Its line is this program's standard input
//! and output: a guest that is booted with `console=ttyS0` and has no other port has its console there.

use std::io::{self, Read, Write};
use std::iter;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use clap::Parser;
use outboard_examples::Socket;
use outboard_pci::{Bar, BarIndex, BarKind, Builder, Identity};
use outboard_vfio_user::function::{Function, Registers};
use vm_superio::serial::{NoEvents, Serial};

/// A serial port: what is typed here the guest receives, and what it sends is printed.
#[derive(Parser)]
#[command(version, after_help = "In a terminal: stty raw -echo; serial …; stty sane")]
struct Arguments {
    #[command(flatten)]
    socket: Socket,
}

const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0002,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    // Simple communication, serial controller, 16550-compatible.
    class: [0x07, 0x00, 0x02],
    revision: 1,
};
const PORTS: BarIndex = BarIndex::new(0).unwrap();

/// How much is kept for who reads our output slowly.
const OUTPUT: usize = 64 << 10;

struct Uart {
    serial: Serial<Level, NoEvents, Line>,
    line: Line,
    input: Receiver<u8>,
}

/// The pin has a level ([`Registers::interrupt`]), so what raises it is of no interest.
struct Level;

impl vm_superio::Trigger for Level {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Clone)]
struct Line(SyncSender<u8>);

impl Write for Line {
    /// Never waits, for the guest would wait, too: what does not fit is lost, as on a line without flow control.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        bytes.iter().for_each(|byte| _ = self.0.try_send(*byte));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Uart {
    fn new(line: Line, input: Receiver<u8>) -> Self {
        Self { serial: Serial::new(Level, line.clone()), line, input }
    }

    /// Takes input while there is room for it.
    fn receive(&mut self) {
        while self.serial.fifo_capacity() > 0
            && let Ok(byte) = self.input.try_recv()
        {
            // In loopback mode the line is not connected.
            let _ = self.serial.enqueue_raw_bytes(&[byte]);
        }
    }
}

impl Registers for Uart {
    fn read(&mut self, _: BarIndex, offset: u64, into: &mut [u8]) {
        (offset..).zip(into).for_each(|(port, byte)| *byte = self.serial.read(port as u8));
        self.receive();
    }

    fn write(&mut self, _: BarIndex, offset: u64, from: &[u8]) {
        (offset..).zip(from).for_each(|(port, byte)| _ = self.serial.write(port as u8, *byte));
    }

    fn reset(&mut self) {
        self.serial = Serial::new(Level, self.line.clone());
    }

    fn interrupt(&self) -> bool {
        let state = self.serial.state();
        // Interrupt Identification: bit 0 says that none is pending.
        state.interrupt_enable != 0 && state.interrupt_identification & 1 == 0
    }
}

/// Prints what comes, until nobody reads it any more.
fn print(output: &Receiver<u8>) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    for byte in output {
        stdout.write_all(&iter::once(byte).chain(output.try_iter()).collect::<Vec<_>>())?;
        stdout.flush()?;
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let backend = Arguments::parse().socket.open()?;
    let config = Builder::new(IDENTITY).bar(PORTS, Bar { kind: BarKind::Io, size: 8 })?.pin(1)?.build();
    let (line, output) = sync_channel(OUTPUT);
    let (keyboard, input) = sync_channel(1);
    thread::spawn(move || print(&output));
    let uart = Arc::new(Function::new(config, Uart::new(Line(line), input)));
    let port = uart.clone();
    thread::spawn(move || {
        for byte in io::stdin().lock().bytes().map_while(Result::ok) {
            // Waits until the guest has taken what came before.
            if keyboard.send(byte).is_err() {
                break;
            }
            port.with(Uart::receive);
        }
    });
    backend.serve(&*uart)
}
