//! An ACCES PCI-IDIO-16: 16 outputs and 16 inputs, as Linux's `gpio-pci-idio-16` drives them.
//!
//! The inputs count, and each step interrupts. What the guest sets its outputs to is in the log.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::Parser;
use outboard_examples::Socket;
use outboard_pci::{Bar, BarIndex, BarKind, Builder, Identity};
use outboard_vfio_user::function::{Function, Registers};

/// A card with 16 outputs and 16 inputs.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    socket: Socket,
    /// How often the inputs change, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    period: u64,
}

const IDENTITY: Identity = Identity {
    vendor: 0x494f,
    device: 0x0dc8,
    subsystem_vendor: 0,
    subsystem: 0,
    // Data acquisition and signal processing, other.
    class: [0x11, 0x80, 0x00],
    revision: 0,
};
const PORTS: BarIndex = BarIndex::new(2).unwrap();

#[derive(Default)]
struct Card {
    outputs: u16,
    inputs: u16,
    interrupts_enabled: bool,
    /// Bit 2: an interrupt is pending; bits 0 and 1: inputs 0 to 7, or 8 to 15, have changed.
    status: u8,
}

impl Card {
    fn set_inputs(&mut self, inputs: u16) {
        let [low, high] = (self.inputs ^ inputs).to_le_bytes();
        if self.interrupts_enabled && (low, high) != (0, 0) {
            self.status |= 1 << 2 | u8::from(high != 0) << 1 | u8::from(low != 0);
        }
        self.inputs = inputs;
    }
}

impl Registers for Card {
    fn read(&mut self, _: BarIndex, offset: u64, into: &mut [u8]) {
        for (port, byte) in (offset..).zip(into) {
            *byte = match port {
                0 => self.outputs.to_le_bytes()[0],
                4 => self.outputs.to_le_bytes()[1],
                1 => self.inputs.to_le_bytes()[0],
                5 => self.inputs.to_le_bytes()[1],
                2 => {
                    self.interrupts_enabled = true;
                    0
                }
                6 => self.status,
                _ => 0xff,
            };
        }
    }

    fn write(&mut self, _: BarIndex, offset: u64, from: &[u8]) {
        let before = self.outputs;
        for (port, &byte) in (offset..).zip(from) {
            match port {
                0 => self.outputs = self.outputs & 0xff00 | u16::from(byte),
                4 => self.outputs = self.outputs & 0x00ff | u16::from(byte) << 8,
                1 => self.status = 0,
                2 => self.interrupts_enabled = false,
                // 3 chooses filters, of which this card has none.
                _ => {}
            }
        }
        if self.outputs != before {
            tracing::info!("outputs {:016b}", self.outputs);
        }
    }

    fn reset(&mut self) {
        *self = Self { inputs: self.inputs, ..Self::default() };
    }

    fn interrupt(&self) -> bool {
        self.interrupts_enabled && self.status != 0
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let backend = arguments.socket.open()?;
    let config = Builder::new(IDENTITY).bar(PORTS, Bar { kind: BarKind::Io, size: 8 })?.pin(1)?.build();
    let card = Arc::new(Function::new(config, Card::default()));
    let outside = card.clone();
    thread::spawn(move || {
        loop {
            thread::sleep(Duration::from_millis(arguments.period));
            outside.with(|card| card.set_inputs(card.inputs.wrapping_add(1)));
        }
    });
    backend.serve(&*card)
}
