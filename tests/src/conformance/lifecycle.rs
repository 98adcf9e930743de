//! Resets, and how sessions begin and end.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outboard_vfio_user::memory::Access;
use outboard_vfio_user::wire::{Command, CommandCode, IrqAction, IrqData, IrqIndex, SetIrqs, Version};

use super::client::{Client, PATIENCE, Sharing, eventfd, mapping, memory};
use super::config::{self, CONFIG};
use super::engine::{self, Direction, Transfers};
use super::{Check, Checked, Stop, Subject, alive, dwords, holds, same};

pub(super) const CHECKS: &[Check] = &[
    Check {
        point: 14,
        title: "resets and unmaps are answered in time under load",
        text: "QEMU gives up after 5 s",
        run: answers_in_time,
    },
    Check {
        point: 68,
        title: "a reset is one of the controller and of the command register; interrupts and memory stay",
        text: "libvfio-user #461; SPDK #3903",
        run: resets,
    },
    Check {
        point: 69,
        title: "10 000 resets, with transfers under way",
        text: "SPDK #2043",
        run: many_resets,
    },
    Check {
        point: 70,
        title: "a reset leaves the state of migration alone",
        text: "libvfio-user #844",
        run: migration_state,
    },
    Check {
        point: 71,
        title: "a client may die at every step, and leaves nothing",
        text: "specification, \"Client Disconnect\"; SPDK #1813",
        run: deaths,
    },
    Check {
        point: 72,
        title: "a second client is refused or waits, and does not disturb the first",
        text: "specification: one client a socket; Cloud Hypervisor #8049",
        run: second_client,
    },
];

const DATA: u64 = 0x10_0000;
const SIZE: u64 = 0x1_0000;

/// A device that is ready, with memory at [`DATA`].
fn ready(subject: &Subject<'_>) -> Checked<(Client, Box<dyn Transfers>)> {
    let mut client = subject.open()?;
    let transfers = engine::start(subject, &mut client, Sharing::Descriptor, IrqIndex::MSIX)?;
    client.share(DATA, SIZE, Access::ReadWrite, Sharing::Descriptor, &Arc::new(memory(SIZE)))?;
    Ok((client, transfers))
}

fn restart(subject: &Subject<'_>, client: &mut Client) -> Checked<Box<dyn Transfers>> {
    match subject.engine() {
        Some(engine) => engine.start(client, engine::ROOM, IrqIndex::MSIX),
        None => Err(Stop::NotOffered("nobody knows how to make this device use memory")),
    }
}

/// Eight transfers that nobody waits for.
fn load(client: &mut Client, transfers: &mut dyn Transfers) -> Checked {
    let unit = transfers.unit();
    (0..8).try_for_each(|part| transfers.begin(client, Direction::Store, DATA + part * 0x1000, unit))
}

fn reset(client: &mut Client) -> Checked {
    client.call(&Command::Reset, &[]).map(|_| ())
}

fn answers_in_time(subject: &Subject<'_>) -> Checked {
    let (mut client, mut transfers) = ready(subject)?;
    for _ in 0..20 {
        load(&mut client, &mut *transfers)?;
        // Each answer is waited for no longer than QEMU does.
        client.unmap(DATA, SIZE)?;
        client.share(DATA, SIZE, Access::ReadWrite, Sharing::Descriptor, &Arc::new(memory(SIZE)))?;
        for _ in 0..8 {
            engine::finish(&mut *transfers, &mut client)?;
        }
        if client.can_reset()? {
            load(&mut client, &mut *transfers)?;
            reset(&mut client)?;
            transfers = restart(subject, &mut client)?;
        }
    }
    Ok(())
}

fn bind(index: IrqIndex) -> SetIrqs<'static> {
    SetIrqs { index, start: 0, count: 1, data: IrqData::Eventfds, action: IrqAction::Trigger }
}

fn resets(subject: &Subject<'_>) -> Checked {
    let (mut client, mut transfers) = ready(subject)?;
    if !client.can_reset()? {
        return Err(Stop::NotOffered("DEVICE_RESET"));
    }
    let vector = eventfd();
    client.set_irqs(bind(IrqIndex::MSIX), &[&vector])?;
    let line = client.read(CONFIG, config::INTERRUPT_LINE, 1)?;
    for way in [reset as fn(&mut Client) -> Checked, config::function_level_reset] {
        let unit = transfers.unit();
        holds(
            engine::transfer(&mut *transfers, &mut client, Direction::Load, DATA, unit)?,
            "a transfer",
            "success",
            "an error",
        )?;
        load(&mut client, &mut *transfers)?;
        match way(&mut client) {
            Err(Stop::NotOffered(_)) => continue,
            done => done?,
        }
        let begin = Instant::now();
        while !subject.engine().is_some_and(|engine| engine.is_reset(&mut client) == Ok(true)) {
            if begin.elapsed() > PATIENCE {
                return client.wrong("a device as at power-on", "another state");
            }
        }
        let command = client.read(CONFIG, config::COMMAND, 2)?;
        same("a reset, then a read of the command register", command, vec![0, 0])?;
        client.write(CONFIG, config::INTERRUPT_LINE, &line)?;
        let set = SetIrqs { data: IrqData::None, ..bind(IrqIndex::MSIX) };
        let _ = vector.read();
        client.set_irqs(set, &[])?;
        same("a reset, then a trigger of a vector", vector.read().unwrap_or(0), 1)?;
        // The memory is still mapped.
        transfers = restart(subject, &mut client)?;
    }
    client.unmap(DATA, SIZE)
}

fn many_resets(subject: &Subject<'_>) -> Checked {
    let (mut client, mut transfers) = ready(subject)?;
    if !client.can_reset()? {
        return Err(Stop::NotOffered("DEVICE_RESET"));
    }
    for round in 0..10_000 {
        if round % 100 == 0 {
            if round > 0 {
                transfers = restart(subject, &mut client)?;
            }
            load(&mut client, &mut *transfers)?;
        }
        match if round % 2 == 0 { reset(&mut client) } else { config::function_level_reset(&mut client) } {
            Ok(()) | Err(Stop::NotOffered(_)) => {}
            Err(other) => return Err(other),
        }
    }
    let mut transfers = restart(subject, &mut client)?;
    let unit = transfers.unit();
    let success = engine::transfer(&mut *transfers, &mut client, Direction::Load, DATA, unit)?;
    holds(success, "a transfer after 10 000 resets", "success", "an error")
}

/// DEVICE_FEATURE, GET of VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE.
fn state(client: &mut Client) -> Checked<Vec<u8>> {
    let body = [dwords([16, 1 << 16 | 2]), vec![0; 8]].concat();
    Ok(client.call_raw(CommandCode::DEVICE_FEATURE, &body, &[])?.body)
}

fn migration_state(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let before = match state(&mut client) {
        Err(Stop::Refused { .. }) => return Err(Stop::NotOffered("migration")),
        state => state?,
    };
    reset(&mut client)?;
    same("a reset, then the state of migration", state(&mut client)?, before)
}

fn deaths(subject: &Subject<'_>) -> Checked {
    let (file, vector) = (memory(0x1000), eventfd());
    let (memory_watch, vector_watch) = (subject.watch(&file), subject.watch(&vector));
    let version = Command::Version(Version::proposal()).encode(1, false);
    for cut in [0, 1, 15, 16, 17, version.len() - 1] {
        subject.connect()?.says("a part of a VERSION").send_bytes(&version[..cut], &[])?;
    }
    let map = Command::DmaMap(mapping(0, 0x1000, Access::ReadWrite, 0)).encode(2, false);
    let set = Command::SetIrqs(bind(IrqIndex::ERR)).encode(3, false);
    for step in 0..6 {
        let mut client = subject.open()?;
        client.says(format!("commands up to step {step}, and no more"));
        if step > 0 {
            client.send_bytes(&map[..if step == 1 { 20 } else { map.len() }], &[file.as_fd()])?;
        }
        if step > 2 {
            client.send_bytes(&set[..if step == 3 { 30 } else { set.len() }], &[vector.as_fd()])?;
        }
        if step > 4 {
            for _ in 0..100 {
                client.send_bytes(&config::read(0, 4).encode(4, false), &[])?;
            }
        }
        drop(client);
        let when = format!("a client that dies at step {step}");
        memory_watch.settles(0, 0, &when)?;
        vector_watch.settles(0, 0, &when)?;
    }
    alive(&mut subject.open()?)?;
    // While the device works: nothing lands in its memory after the next client has been let in.
    if subject.engine().is_none() {
        return Ok(());
    }
    for _ in 0..10 {
        let mut client = subject.open()?;
        let mut transfers = engine::start(subject, &mut client, Sharing::Descriptor, IrqIndex::MSIX)?;
        let data = Arc::new(memory(SIZE));
        let watch = subject.watch(&*data);
        client.share(DATA, SIZE, Access::ReadWrite, Sharing::Descriptor, &data)?;
        load(&mut client, &mut *transfers)?;
        drop(client);
        watch.settles(0, 0, "a client that dies under load")?;
        alive(&mut subject.open()?)?;
    }
    // While the server waits for its memory.
    let mut client = subject.open()?;
    let mut transfers = engine::start(subject, &mut client, Sharing::Messages, IrqIndex::MSIX)?;
    client.share(DATA, SIZE, Access::ReadWrite, Sharing::Messages, &Arc::new(memory(SIZE)))?;
    load(&mut client, &mut *transfers)?;
    drop(client);
    let (mut client, mut transfers) = ready(subject)?;
    let unit = transfers.unit();
    let success = engine::transfer(&mut *transfers, &mut client, Direction::Store, DATA, unit)?;
    holds(success, "a transfer of the next client", "success", "an error")
}

fn second_client(subject: &Subject<'_>) -> Checked {
    let mut first = subject.open()?;
    first.write(CONFIG, config::INTERRUPT_LINE, &[0x5a])?;
    if let Ok(mut second) = subject.connect() {
        second.says("VERSION of a second client");
        // Refused: the connection ends, perhaps before this is sent. Or it waits, perhaps for long.
        if second.send_bytes(&Command::Version(Version::proposal()).encode(1, false), &[]).is_ok()
            && let Ok(Some(message)) = second.receive_within(Duration::from_millis(300))
        {
            return second
                .wrong("the end of the connection, or nothing yet", format!("{:?}", message.header));
        }
        let line = first.read(CONFIG, config::INTERRUPT_LINE, 1)?;
        same("a read of the first client", line, vec![0x5a])?;
    }
    alive(&mut first)?;
    drop(first);
    alive(&mut subject.open()?)
}
