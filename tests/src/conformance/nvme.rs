//! An NVMe drive as an engine: its first namespace, of blocks of 512 bytes, through one I/O queue pair.

use std::time::{Duration, Instant};

use outboard_nvme::spec::{AdminOpcode, NvmOpcode, SubmissionEntry};
use outboard_vfio_user::wire::IrqIndex;
use zerocopy::IntoBytes;

use super::client::PATIENCE;
use super::engine::{Direction, Engine, Transfers};
use super::{Checked, Client, config};

/// An NVMe drive.
#[derive(Clone, Copy, Debug)]
pub struct NvmeDrive;

const BAR0: u32 = 0;
const PAGE: u64 = 4096;
const ENTRIES: u16 = 16;
/// Its own memory: a page for each queue, and one for a PRP list.
const ADMIN: (u64, u64) = (0, PAGE);
const IO: (u64, u64) = (2 * PAGE, 3 * PAGE);
const LIST: u64 = 4 * PAGE;
const BLOCK: usize = 512;
/// The vector of the I/O completion queue.
const VECTOR: u32 = 1;

/// Registers (NVMe 1.4, 3.1).
const CAP_HIGH: u64 = 0x04;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;

fn register(client: &mut Client, offset: u64) -> Checked<u32> {
    let bytes = client.read(BAR0, offset, 4)?;
    Ok(bytes.try_into().map_or(0, u32::from_le_bytes))
}

fn set_register(client: &mut Client, offset: u64, value: u32) -> Checked {
    client.write(BAR0, offset, &value.to_le_bytes())
}

/// Waits for CSTS.RDY.
fn wait_ready(client: &mut Client, ready: u32) -> Checked {
    let begin = Instant::now();
    while register(client, CSTS)? & 1 != ready {
        if begin.elapsed() > PATIENCE {
            return client.wrong(&format!("CSTS.RDY is {ready}"), "it is not");
        }
        client.serve_for(Duration::from_micros(200))?;
    }
    Ok(())
}

impl Engine for NvmeDrive {
    fn room(&self) -> u64 {
        5 * PAGE
    }

    fn start(&self, client: &mut Client, room: u64, interrupts: IrqIndex) -> Checked<Box<dyn Transfers>> {
        config::enable(client, interrupts == IrqIndex::MSIX)?;
        set_register(client, CC, 0)?;
        wait_ready(client, 0)?;
        client.ram.poke(room, &[0; 5 * PAGE as usize]);
        let size = u32::from(ENTRIES - 1);
        set_register(client, AQA, size << 16 | size)?;
        for (register, address) in [(ASQ, room + ADMIN.0), (ACQ, room + ADMIN.1)] {
            client.write(BAR0, register, &address.to_le_bytes())?;
        }
        // Entries of 64 and 16 bytes, enabled.
        set_register(client, CC, 4 << 20 | 6 << 16 | 1)?;
        wait_ready(client, 1)?;
        let stride = register(client, CAP_HIGH)? & 0xf;
        let queue = |id, (submissions, completions)| Queue {
            id,
            stride,
            submissions: room + submissions,
            completions: room + completions,
            tail: 0,
            head: 0,
            phase: true,
        };
        let mut admin = queue(0, ADMIN);
        let create = |opcode: AdminOpcode, address: u64, flags: u32| SubmissionEntry {
            opcode: opcode.0,
            prp1: address.into(),
            dword10: (size << 16 | 1).into(),
            dword11: flags.into(),
            ..SubmissionEntry::default()
        };
        for entry in [
            // Contiguous, with interrupts; contiguous, for queue 1.
            create(AdminOpcode::CREATE_COMPLETION_QUEUE, room + IO.1, VECTOR << 16 | 3),
            create(AdminOpcode::CREATE_SUBMISSION_QUEUE, room + IO.0, 1 << 16 | 1),
        ] {
            admin.submit(client, entry)?;
            let begin = Instant::now();
            let status = loop {
                if let Some(status) = admin.completion(client)? {
                    break status;
                }
                if begin.elapsed() > PATIENCE {
                    return client.wrong("an admin command's completion", "none");
                }
                client.serve_for(Duration::from_micros(200))?;
            };
            if status != 0 {
                return client.wrong("I/O queues", format!("status {status:#x}"));
            }
        }
        Ok(Box::new(Drive {
            queue: queue(1, IO),
            list: room + LIST,
            vector: if interrupts == IrqIndex::MSIX { VECTOR } else { 0 },
        }))
    }

    fn is_reset(&self, client: &mut Client) -> Checked<bool> {
        Ok(register(client, CC)? == 0 && register(client, CSTS)? == 0)
    }
}

struct Queue {
    id: u32,
    stride: u32,
    submissions: u64,
    completions: u64,
    tail: u16,
    head: u16,
    phase: bool,
}

impl Queue {
    fn ring(&self, client: &mut Client, completions: u32, value: u16) -> Checked {
        let offset = DOORBELLS + u64::from((2 * self.id + completions) * (4 << self.stride));
        client.write(BAR0, offset, &u32::from(value).to_le_bytes())
    }

    fn submit(&mut self, client: &mut Client, mut entry: SubmissionEntry) -> Checked {
        entry.command_id = self.tail.into();
        client.ram.poke(self.submissions + u64::from(self.tail) * 64, entry.as_bytes());
        self.tail = (self.tail + 1) % ENTRIES;
        self.ring(client, 0, self.tail)
    }

    /// The status of the next command that is complete.
    fn completion(&mut self, client: &mut Client) -> Checked<Option<u16>> {
        let entry = client.ram.peek(self.completions + u64::from(self.head) * 16, 16);
        let status = u16::from_le_bytes([entry[14], entry[15]]);
        if (status & 1 != 0) != self.phase {
            return Ok(None);
        }
        self.head = (self.head + 1) % ENTRIES;
        if self.head == 0 {
            self.phase = !self.phase;
        }
        self.ring(client, 1, self.head)?;
        Ok(Some(status >> 1))
    }
}

struct Drive {
    queue: Queue,
    list: u64,
    vector: u32,
}

impl Transfers for Drive {
    fn unit(&self) -> usize {
        BLOCK
    }

    fn most(&self) -> usize {
        128 << 10
    }

    fn vector(&self) -> u32 {
        self.vector
    }

    fn begin(&mut self, client: &mut Client, direction: Direction, at: u64, length: usize) -> Checked {
        let pages = length.div_ceil(PAGE as usize) as u64;
        let second = match pages {
            0 | 1 => 0,
            2 => at + PAGE,
            _ => {
                let list: Vec<u8> = (1..pages).flat_map(|page| (at + page * PAGE).to_le_bytes()).collect();
                client.ram.poke(self.list, &list);
                self.list
            }
        };
        let opcode = match direction {
            Direction::Load => NvmOpcode::WRITE,
            Direction::Store => NvmOpcode::READ,
        };
        let entry = SubmissionEntry {
            opcode: opcode.0,
            nsid: 1.into(),
            prp1: at.into(),
            prp2: second.into(),
            dword12: (length.div_ceil(BLOCK) as u32 - 1).into(),
            ..SubmissionEntry::default()
        };
        self.queue.submit(client, entry)
    }

    fn poll(&mut self, client: &mut Client) -> Checked<Option<bool>> {
        Ok(self.queue.completion(client)?.map(|status| status == 0))
    }
}
