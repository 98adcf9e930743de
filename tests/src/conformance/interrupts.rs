//! GET_IRQ_INFO and SET_IRQS.

use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::wire::{
    Command, CommandCode, IrqAction, IrqData, IrqFlags, IrqIndex, Query, SetIrqs,
};

use super::client::{Client, PATIENCE, Sharing, eventfd, memory};
use super::engine::{self, Direction};
use super::{Check, Checked, EINVAL, Stop, Subject, alive, dwords, holds, refused, same};

pub(super) const CHECKS: &[Check] = &[
    Check {
        point: 33,
        title: "what is said of interrupts, and of those that do not exist",
        text: "libvfio-user; QEMU changes its ways with NORESIZE",
        run: information,
    },
    Check {
        point: 34,
        title: "SET_IRQS without a meaning is EINVAL, and changes nothing",
        text: "libvfio-user #790, #791",
        run: meaningless,
    },
    Check {
        point: 35,
        title: "a vector that was never bound can be unbound",
        text: "QEMU vfio_enable_msix_no_vec",
        run: unbind_unbound,
    },
    Check {
        point: 36,
        title: "an unbind lets go of exactly its range",
        text: "specification, \"VFIO_USER_DEVICE_SET_IRQS\"",
        run: unbind_range,
    },
    Check {
        point: 37,
        title: "a vector that is bound again closes its old descriptor",
        text: "QEMU swaps them at each mask",
        run: rebind,
    },
    Check {
        point: 38,
        title: "disabling a type of interrupt leaves the others alone",
        text: "specification; libvfio-user shares a table",
        run: disable,
    },
    Check {
        point: 39,
        title: "NONE and BOOL fire what they name, by 1, and what is not bound is nobody's",
        text: "libvfio-user",
        run: loop_back,
    },
    Check {
        point: 40,
        title: "all vectors can be bound, in runs of any length",
        text: "QEMU; Cloud Hypervisor in runs of 16",
        run: runs,
    },
    Check {
        point: 41,
        title: "16 descriptors come in one message, whatever was announced",
        text: "Cloud Hypervisor",
        run: sixteen,
    },
    Check {
        point: 42,
        title: "masks hold interrupts back, and lose none; the pin is resampled through its descriptor",
        text: "QEMU with KVM's irqfd",
        run: masks,
    },
    Check {
        point: 43,
        title: "an eventfd that would block, or whose client is gone, stops nobody",
        text: "SPDK 25440c3bdb",
        run: full_counters,
    },
    Check {
        point: 44,
        title: "ERR and REQ have a descriptor each, to trigger and nothing else",
        text: "libvfio-user #731",
        run: events,
    },
];

const NONE: u32 = 1;
const BOOL: u32 = 2;
const EVENTFD: u32 = 4;
const MASK: u32 = 8;
const UNMASK: u32 = 16;
const TRIGGER: u32 = 32;

fn bind(index: IrqIndex, start: u32, count: usize) -> SetIrqs<'static> {
    SetIrqs { index, start, count: count as u32, data: IrqData::Eventfds, action: IrqAction::Trigger }
}

fn set(index: IrqIndex, start: u32, count: u32, data: IrqData<'_>, action: IrqAction) -> SetIrqs<'_> {
    SetIrqs { index, start, count, data, action }
}

fn fired(eventfd: &EventFd) -> u64 {
    eventfd.read().unwrap_or(0)
}

/// Waits for a signal.
fn signalled(eventfd: &EventFd, client: &mut Client, what: &str) -> Checked {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if fired(eventfd) > 0 {
            return Ok(());
        }
        client.serve_for(Duration::from_millis(1))?;
    }
    client.wrong(what, format!("none within {PATIENCE:?}"))
}

/// A client, the message interrupts of the device, and how many there are: at least `least`.
fn vectors(subject: &Subject<'_>, least: u32) -> Checked<(Client, IrqIndex, u32)> {
    let mut client = subject.open()?;
    for index in [IrqIndex::MSIX, IrqIndex::MSI] {
        let count = client.irq_info(index)?.count;
        if count >= least {
            return Ok((client, index, count));
        }
    }
    Err(Stop::NotOffered("too few message interrupts"))
}

fn eventfds(count: usize) -> Vec<EventFd> {
    (0..count).map(|_| eventfd()).collect()
}

fn trigger(client: &mut Client, index: IrqIndex, start: u32, count: u32) -> Checked {
    client.set_irqs(set(index, start, count, IrqData::None, IrqAction::Trigger), &[])
}

fn information(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let count = client.info()?.interrupts;
    for (argsz, index) in [(0, 0), (15, 0), (16, count), (16, u32::MAX)] {
        let body = dwords([argsz, 0, index, 0]);
        let result = client.call_raw(CommandCode::DEVICE_GET_IRQ_INFO, &body, &[]);
        refused(result, &format!("GET_IRQ_INFO of {index} with an argsz of {argsz}"), &[EINVAL])?;
    }
    for index in 0..count {
        let info = client.irq_info(IrqIndex(index))?;
        same(format!("GET_IRQ_INFO of {index}"), info.index, IrqIndex(index))?;
        let eventfd = info.count == 0 || info.flags.contains(IrqFlags::EVENTFD);
        holds(eventfd, &format!("GET_IRQ_INFO of {index}"), "EVENTFD", info)?;
        let padded = client.call(&Command::GetIrqInfo(Query { argsz: 32, index }), &[])?;
        same(format!("GET_IRQ_INFO of {index} with an argsz of 32"), padded.body.len(), 16)?;
    }
    Ok(())
}

fn meaningless(subject: &Subject<'_>) -> Checked {
    let (mut client, index, count) = vectors(subject, 2)?;
    let bound = eventfd();
    client.set_irqs(bind(index, 1, 1), &[&bound])?;
    let types = client.info()?.interrupts;
    let at = index.0;
    for body in [
        [20, NONE | TRIGGER, at, 284, u32::MAX],
        [20, NONE | TRIGGER, at, u32::MAX, 1],
        [20, NONE | TRIGGER, at, 1, u32::MAX],
        [20, NONE | TRIGGER, at, count, 1],
        [20, NONE | TRIGGER, at, count - 1, 2],
        [20, NONE | TRIGGER, at, 1, 0],
        [20, NONE | MASK, at, 0, 0],
        [20, EVENTFD | TRIGGER, at, 0, 0],
        [20, NONE | TRIGGER, types, 0, 1],
        [19, NONE | TRIGGER, at, 0, 1],
        [20, NONE, at, 0, 1],
        [20, TRIGGER, at, 0, 1],
        [20, NONE | BOOL | TRIGGER, at, 0, 1],
        [20, NONE | MASK | UNMASK, at, 0, 1],
        [20, BOOL | TRIGGER, at, 0, 1],
        [20, 64 | NONE | TRIGGER, at, 0, 1],
        [20, NONE | MASK, 3, 0, 1],
        [20, NONE | TRIGGER, 4, 0, 2],
    ] {
        let result = client.call_raw(CommandCode::DEVICE_SET_IRQS, &dwords(body), &[]);
        refused(result, &format!("SET_IRQS {body:?}"), &[EINVAL])?;
    }
    let bools = [dwords([22, BOOL | TRIGGER, at, 0, 1]), vec![1, 1]].concat();
    let result = client.call_raw(CommandCode::DEVICE_SET_IRQS, &bools, &[]);
    refused(result, "SET_IRQS of one vector with two booleans", &[EINVAL])?;
    use std::os::fd::AsFd;
    for (flags, count, given) in
        [(NONE | TRIGGER, 1, 1), (EVENTFD | TRIGGER, 2, 1), (EVENTFD | TRIGGER, 1, 2)]
    {
        let spare = eventfd();
        let watch = subject.watch(&spare);
        let body = dwords([20, flags, at, 0, count]);
        let result = client.call_raw(CommandCode::DEVICE_SET_IRQS, &body, &vec![spare.as_fd(); given]);
        let sent = format!("SET_IRQS of {count} vectors with {given} descriptors");
        refused(result, &sent, &[EINVAL])?;
        watch.settles(0, 0, &sent)?;
    }
    same("SET_IRQS without a meaning", fired(&bound), 0)?;
    trigger(&mut client, index, 1, 1)?;
    same("a trigger of the vector that was bound before", fired(&bound), 1)
}

fn unbind_unbound(subject: &Subject<'_>) -> Checked {
    let (mut client, index, count) = vectors(subject, 1)?;
    for start in [0, count - 1] {
        client.set_irqs(set(index, start, 1, IrqData::Unbind, IrqAction::Trigger), &[])?;
    }
    Ok(())
}

fn unbind_range(subject: &Subject<'_>) -> Checked {
    let (mut client, index, _) = vectors(subject, 8)?;
    let vectors = eventfds(8);
    client.set_irqs(bind(index, 0, 8), &vectors.iter().collect::<Vec<_>>())?;
    let watches: Vec<_> = vectors.iter().map(|vector| subject.watch_held(vector)).collect();
    client.set_irqs(set(index, 3, 2, IrqData::Unbind, IrqAction::Trigger), &[])?;
    trigger(&mut client, index, 0, 8)?;
    let left: Vec<u64> = vectors.iter().map(fired).collect();
    same("an unbind of vectors 3 and 4 of 8, then a trigger of all", left, vec![1, 1, 1, 0, 0, 1, 1, 1])?;
    for (at, watch) in watches.iter().enumerate() {
        watch.settles(usize::from(!(3..5).contains(&at)), 0, "an unbind of vectors 3 and 4 of 8")?;
    }
    Ok(())
}

fn rebind(subject: &Subject<'_>) -> Checked {
    let (mut client, index, _) = vectors(subject, 1)?;
    let (old, new) = (eventfd(), eventfd());
    let watch = subject.watch(&old);
    client.set_irqs(bind(index, 0, 1), &[&old])?;
    watch.settles(1, 0, "a bind")?;
    for _ in 0..50 {
        client.set_irqs(bind(index, 0, 1), &[&new])?;
        watch.settles(0, 0, "a bind of another descriptor")?;
        client.set_irqs(bind(index, 0, 1), &[&old])?;
    }
    client.set_irqs(bind(index, 0, 1), &[&new])?;
    trigger(&mut client, index, 0, 1)?;
    same("a trigger after another bind", (fired(&old), fired(&new)), (0, 1))
}

fn disable(subject: &Subject<'_>) -> Checked {
    let (mut client, index, _) = vectors(subject, 2)?;
    let mut others = Vec::new();
    for other in [IrqIndex::INTX, IrqIndex::ERR, IrqIndex::REQ] {
        if client.irq_info(other)?.count > 0 {
            let eventfd = eventfd();
            client.set_irqs(bind(other, 0, 1), &[&eventfd])?;
            others.push((other, eventfd));
        }
    }
    let vectors = eventfds(2);
    client.set_irqs(bind(index, 0, 2), &[&vectors[0], &vectors[1]])?;
    if client.irq_info(IrqIndex::INTX)?.count > 0 {
        trigger(&mut client, IrqIndex::INTX, 0, 0)?;
        let (_, pin) = others.remove(0);
        trigger(&mut client, IrqIndex::INTX, 0, 1)?;
        same("a trigger of INTx, which was disabled", fired(&pin), 0)?;
    }
    trigger(&mut client, index, 0, 2)?;
    same("INTx disabled, then a trigger of the messages", (fired(&vectors[0]), fired(&vectors[1])), (1, 1))?;
    let watch = subject.watch_held(&vectors[0]);
    trigger(&mut client, index, 0, 0)?;
    watch.settles(0, 0, "the message interrupts disabled")?;
    trigger(&mut client, index, 0, 2)?;
    same("a trigger of what was disabled", (fired(&vectors[0]), fired(&vectors[1])), (0, 0))?;
    for (other, eventfd) in &others {
        trigger(&mut client, *other, 0, 1)?;
        same(format!("messages disabled, then a trigger of {other:?}"), fired(eventfd), 1)?;
    }
    Ok(())
}

fn loop_back(subject: &Subject<'_>) -> Checked {
    let (mut client, index, _) = vectors(subject, 5)?;
    let vectors = eventfds(4);
    client.set_irqs(bind(index, 0, 4), &vectors.iter().collect::<Vec<_>>())?;
    trigger(&mut client, index, 2, 3)?;
    client.set_irqs(set(index, 1, 3, IrqData::Bool(&[1, 0, 1]), IrqAction::Trigger), &[])?;
    let counters: Vec<u64> = vectors.iter().map(fired).collect();
    same("NONE|TRIGGER of 2 to 4, BOOL|TRIGGER of 1 and 3", counters, vec![0, 1, 1, 2])
}

fn runs(subject: &Subject<'_>) -> Checked {
    let (mut client, index, count) = vectors(subject, 2)?;
    let vectors = eventfds(count as usize);
    let mut start = 0;
    for length in [1, 8].into_iter().chain(std::iter::repeat(16)) {
        let end = vectors.len().min(start + length);
        let run: Vec<_> = vectors[start..end].iter().collect();
        if run.is_empty() {
            break;
        }
        client.set_irqs(bind(index, start as u32, run.len()), &run)?;
        start = end;
    }
    trigger(&mut client, index, 0, count)?;
    let silent = vectors.iter().position(|vector| fired(vector) != 1);
    same(format!("{count} vectors bound in runs of 1, 8 and 16, and triggered"), silent, None)?;
    let watch = subject.watch_held(&vectors[0]);
    drop(client);
    watch.settles(0, 0, "the end of the connection")
}

fn sixteen(subject: &Subject<'_>) -> Checked {
    let (mut client, index, _) = vectors(subject, 16)?;
    let vectors = eventfds(16);
    client.set_irqs(bind(index, 0, 16), &vectors.iter().collect::<Vec<_>>())
}

fn masks(subject: &Subject<'_>) -> Checked {
    let (mut client, index, _) = vectors(subject, 2)?;
    let mut mask = |index, action| client.set_irqs(set(index, 0, 1, IrqData::None, action), &[]);
    mask(index, IrqAction::Mask)?;
    mask(index, IrqAction::Unmask)?;
    if client.irq_info(IrqIndex::INTX)?.count > 0 {
        let (pin, unmask) = (eventfd(), eventfd());
        client.set_irqs(bind(IrqIndex::INTX, 0, 1), &[&pin])?;
        for action in [IrqAction::Mask, IrqAction::Unmask] {
            client.set_irqs(set(IrqIndex::INTX, 0, 1, IrqData::None, action), &[])?;
        }
        client.set_irqs(set(IrqIndex::INTX, 0, 1, IrqData::Eventfds, IrqAction::Unmask), &[&unmask])?;
    }
    drop(client);
    let file = std::sync::Arc::new(memory(0x1000));
    // A message that is held back, and comes.
    let mut client = subject.open()?;
    let mut transfers = engine::start(subject, &mut client, Sharing::Descriptor, IrqIndex::MSIX)?;
    client.share(0, 0x1000, Access::ReadWrite, Sharing::Descriptor, &file)?;
    let (message, vector, unit) = (eventfd(), transfers.vector(), transfers.unit());
    client.set_irqs(bind(IrqIndex::MSIX, vector, 1), &[&message])?;
    // Its end is not looked at before the interrupt: a device need not tell what is known already.
    transfers.begin(&mut client, Direction::Store, 0, unit)?;
    signalled(&message, &mut client, "an interrupt at the end of a transfer")?;
    engine::finish(&mut *transfers, &mut client)?;
    client.set_irqs(set(IrqIndex::MSIX, vector, 1, IrqData::None, IrqAction::Mask), &[])?;
    transfers.begin(&mut client, Direction::Store, 0, unit)?;
    client.serve_for(Duration::from_millis(50))?;
    same("a transfer with its vector masked", fired(&message), 0)?;
    client.set_irqs(set(IrqIndex::MSIX, vector, 1, IrqData::None, IrqAction::Unmask), &[])?;
    signalled(&message, &mut client, "the interrupt that was held back, after the unmask")?;
    drop(client);
    // The pin: it stays asserted while a completion waits, so it fires again when it is unmasked.
    let mut client = subject.open()?;
    if client.irq_info(IrqIndex::INTX)?.count == 0 {
        return Ok(());
    }
    let mut transfers = engine::start(subject, &mut client, Sharing::Descriptor, IrqIndex::INTX)?;
    client.share(0, 0x1000, Access::ReadWrite, Sharing::Descriptor, &file)?;
    let (pin, unmask) = (eventfd(), eventfd());
    client.set_irqs(bind(IrqIndex::INTX, 0, 1), &[&pin])?;
    client.set_irqs(set(IrqIndex::INTX, 0, 1, IrqData::Eventfds, IrqAction::Unmask), &[&unmask])?;
    transfers.begin(&mut client, Direction::Store, 0, unit)?;
    signalled(&pin, &mut client, "the pin, at the end of a transfer")?;
    client.serve_for(Duration::from_millis(20))?;
    same("nothing, while the pin is masked", fired(&pin), 0)?;
    let _ = unmask.write(1);
    signalled(&pin, &mut client, "the pin again, since it is still asserted after its unmask")?;
    engine::finish(&mut *transfers, &mut client)?;
    // The device may need a moment to see that all was looked at.
    let begin = Instant::now();
    loop {
        let _ = unmask.write(1);
        client.serve_for(Duration::from_millis(20))?;
        if fired(&pin) == 0 {
            return Ok(());
        }
        if begin.elapsed() > PATIENCE {
            return client.wrong("no pin, with nothing left to tell", "it fires at each unmask");
        }
    }
}

fn full_counters(subject: &Subject<'_>) -> Checked {
    let (mut client, index, _) = vectors(subject, 1)?;
    for flags in [EfdFlags::EFD_CLOEXEC, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK] {
        let full = EventFd::from_value_and_flags(0, flags).expect("an eventfd");
        let _ = full.write(u64::MAX - 1);
        client.set_irqs(bind(index, 0, 1), &[&full])?;
        // It may become one that blocks after it was handed over.
        let _ = fcntl(&full, FcntlArg::F_SETFL(OFlag::empty()));
        trigger(&mut client, index, 0, 1)?;
        alive(&mut client)?;
    }
    drop(client);
    alive(&mut subject.open()?)
}

fn events(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let (error, request) = (eventfd(), eventfd());
    for index in [IrqIndex::ERR, IrqIndex::REQ] {
        if client.irq_info(index)?.count == 0 {
            return Err(Stop::NotOffered("ERR and REQ"));
        }
    }
    client.set_irqs(bind(IrqIndex::ERR, 0, 1), &[&error])?;
    client.set_irqs(bind(IrqIndex::REQ, 0, 1), &[&request])?;
    trigger(&mut client, IrqIndex::ERR, 0, 1)?;
    same("a trigger of ERR", (fired(&error), fired(&request)), (1, 0))?;
    trigger(&mut client, IrqIndex::REQ, 0, 1)?;
    same("a trigger of REQ", (fired(&error), fired(&request)), (0, 1))?;
    for index in [IrqIndex::ERR, IrqIndex::REQ] {
        for action in [IrqAction::Mask, IrqAction::Unmask] {
            let result = client.set_irqs(set(index, 0, 1, IrqData::None, action), &[]);
            refused(result, &format!("{action:?} of {index:?}"), &[EINVAL])?;
        }
    }
    Ok(())
}
