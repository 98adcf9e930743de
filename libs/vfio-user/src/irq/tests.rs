use std::os::fd::AsFd;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use proptest::prelude::*;

use super::*;

const COUNTS: [u32; 5] = [1, 0, 8, 1, 1];

fn eventfd() -> EventFd {
    EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap()
}

fn handed(eventfd: &EventFd) -> OwnedFd {
    eventfd.as_fd().try_clone_to_owned().unwrap()
}

fn bind(interrupts: &Interrupts, index: IrqIndex, start: u32, fds: &[&EventFd]) -> Result<(), IrqError> {
    let count = fds.len() as u32;
    let fds = fds.iter().map(|fd| handed(fd)).collect();
    let data = IrqData::Eventfds;
    interrupts.set(&SetIrqs { index, start, count, action: IrqAction::Trigger, data }, fds)
}

fn plain(index: IrqIndex, start: u32, count: u32, action: IrqAction) -> SetIrqs<'static> {
    SetIrqs { index, start, count, action, data: IrqData::None }
}

fn count(eventfd: &EventFd) -> u64 {
    eventfd.read().unwrap_or(0)
}

#[test]
fn an_interrupt_reaches_the_descriptor_of_its_own_vector() {
    let interrupts = Interrupts::new(&COUNTS);
    let (a, b, err, req) = (eventfd(), eventfd(), eventfd(), eventfd());
    bind(&interrupts, IrqIndex::MSIX, 0, &[&a, &b]).unwrap();
    bind(&interrupts, IrqIndex::ERR, 0, &[&err]).unwrap();
    bind(&interrupts, IrqIndex::REQ, 0, &[&req]).unwrap();
    interrupts.trigger(IrqIndex::MSIX, 1);
    interrupts.trigger(IrqIndex::MSIX, 5);
    interrupts.trigger(IrqIndex::ERR, 0);
    assert_eq!([&a, &b, &err, &req].map(count), [0, 1, 1, 0]);
}

/// Fault 5: the loop must end at start + count.
#[test]
fn unbinding_a_range_unbinds_that_range_and_closes_its_descriptors() {
    let interrupts = Interrupts::new(&COUNTS);
    let fds: Vec<_> = (0..8).map(|_| eventfd()).collect();
    bind(&interrupts, IrqIndex::MSIX, 0, &fds.iter().collect::<Vec<_>>()).unwrap();
    let unbind = SetIrqs { data: IrqData::Unbind, ..plain(IrqIndex::MSIX, 5, 2, IrqAction::Trigger) };
    interrupts.set(&unbind, vec![]).unwrap();
    (0..8).for_each(|vector| interrupts.trigger(IrqIndex::MSIX, vector));
    assert_eq!(fds.iter().map(count).collect::<Vec<_>>(), [1, 1, 1, 1, 1, 0, 0, 1]);
}

#[test]
fn a_masked_vector_waits_and_fires_once_when_unmasked() {
    let interrupts = Interrupts::new(&COUNTS);
    let a = eventfd();
    bind(&interrupts, IrqIndex::MSIX, 3, &[&a]).unwrap();
    interrupts.set(&plain(IrqIndex::MSIX, 3, 1, IrqAction::Mask), vec![]).unwrap();
    interrupts.trigger(IrqIndex::MSIX, 3);
    interrupts.trigger(IrqIndex::MSIX, 3);
    assert_eq!(count(&a), 0);
    interrupts.set(&plain(IrqIndex::MSIX, 3, 1, IrqAction::Unmask), vec![]).unwrap();
    interrupts.set(&plain(IrqIndex::MSIX, 3, 1, IrqAction::Unmask), vec![]).unwrap();
    assert_eq!(count(&a), 1);
}

#[test]
fn the_pin_is_masked_by_firing_and_fires_again_while_asserted() {
    let interrupts = Interrupts::new(&COUNTS);
    let (line, resample) = (eventfd(), eventfd());
    bind(&interrupts, IrqIndex::INTX, 0, &[&line]).unwrap();
    let bind_unmask = SetIrqs { data: IrqData::Eventfds, ..plain(IrqIndex::INTX, 0, 1, IrqAction::Unmask) };
    interrupts.set(&bind_unmask, vec![handed(&resample)]).unwrap();
    interrupts.set_line(true);
    interrupts.set_line(true);
    assert_eq!(count(&line), 1);
    resample.write(1).unwrap();
    interrupts.unmasked();
    assert_eq!(count(&line), 1, "still asserted");
    interrupts.set_line(false);
    resample.write(1).unwrap();
    interrupts.unmasked();
    assert_eq!(count(&line), 0);
    interrupts.set_line(true);
    assert_eq!(count(&line), 1);
}

/// A level that lasts is not lost on who was not listening when it began.
#[test]
fn an_asserted_pin_interrupts_who_comes_to_listen() {
    let interrupts = Interrupts::new(&COUNTS);
    let set = |action| interrupts.set(&plain(IrqIndex::INTX, 0, 1, action), vec![]).unwrap();
    let listen = || {
        let line = eventfd();
        bind(&interrupts, IrqIndex::INTX, 0, &[&line]).unwrap();
        line
    };
    interrupts.set_line(true);
    assert_eq!(count(&listen()), 1);
    assert_eq!(count(&listen()), 0, "masked by firing, whoever listens");
    interrupts.set(&plain(IrqIndex::INTX, 0, 0, IrqAction::Trigger), vec![]).unwrap();
    set(IrqAction::Unmask);
    assert_eq!(count(&listen()), 1, "unmasking fired at nobody, which masks nothing");
    interrupts.set(&plain(IrqIndex::INTX, 0, 0, IrqAction::Trigger), vec![]).unwrap();
    set(IrqAction::Mask);
    let line = listen();
    assert_eq!(count(&line), 0, "the client's own mask holds it");
    set(IrqAction::Unmask);
    assert_eq!(count(&line), 1);
}

#[test]
fn disabling_an_index_leaves_the_others() {
    let interrupts = Interrupts::new(&COUNTS);
    let (pin, message) = (eventfd(), eventfd());
    bind(&interrupts, IrqIndex::INTX, 0, &[&pin]).unwrap();
    bind(&interrupts, IrqIndex::MSIX, 0, &[&message]).unwrap();
    interrupts.set(&plain(IrqIndex::INTX, 0, 0, IrqAction::Trigger), vec![]).unwrap();
    interrupts.set_line(true);
    interrupts.trigger(IrqIndex::MSIX, 0);
    assert_eq!([count(&pin), count(&message)], [0, 1]);
}

/// Fault 4 and conformance point 34: no sum wraps, and nothing changes. What needs no knowledge of the device is
/// refused by the decoder.
#[test]
fn what_has_no_meaning_is_refused() {
    let interrupts = Interrupts::new(&COUNTS);
    let eventfds = |request: SetIrqs<'static>| SetIrqs { data: IrqData::Eventfds, ..request };
    let refused = [
        (plain(IrqIndex(5), 0, 1, IrqAction::Trigger), 0),
        (plain(IrqIndex::MSI, 0, 0, IrqAction::Trigger), 0),
        (plain(IrqIndex::MSIX, 8, 1, IrqAction::Trigger), 0),
        (plain(IrqIndex::MSIX, 284, u32::MAX, IrqAction::Trigger), 0),
        (plain(IrqIndex::MSIX, 1, u32::MAX, IrqAction::Trigger), 0),
        (plain(IrqIndex::MSIX, 1, 8, IrqAction::Trigger), 0),
        (SetIrqs { data: IrqData::Bool(&[1; 3]), ..plain(IrqIndex::MSIX, 0, 2, IrqAction::Trigger) }, 0),
        (eventfds(plain(IrqIndex::MSIX, 0, 2, IrqAction::Trigger)), 1),
        (eventfds(plain(IrqIndex::MSIX, 0, 1, IrqAction::Mask)), 1),
        (eventfds(plain(IrqIndex::MSIX, 0, 1, IrqAction::Unmask)), 1),
    ];
    for (request, descriptors) in refused {
        let fds = (0..descriptors).map(|_| handed(&eventfd())).collect();
        assert!(interrupts.set(&request, fds).is_err(), "{request:?}");
    }
}

#[test]
fn only_an_eventfd_is_taken() {
    let interrupts = Interrupts::new(&COUNTS);
    let (pipe, _other_end) = nix::unistd::pipe().unwrap();
    let request = SetIrqs { data: IrqData::Eventfds, ..plain(IrqIndex::MSIX, 0, 1, IrqAction::Trigger) };
    assert_eq!(interrupts.set(&request, vec![pipe]), Err(IrqError::NotEventfd));
}

/// Conformance point 43: a client that makes its eventfd block holds a writer only until the session ends.
#[test]
fn closing_frees_a_writer_that_a_full_eventfd_blocks() {
    let interrupts = Arc::new(Interrupts::new(&COUNTS));
    let full = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
    full.write(u64::MAX - 1).unwrap();
    bind(&interrupts, IrqIndex::MSIX, 0, &[&full]).unwrap();
    fcntl(&full, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    // The session's own thread looks first.
    interrupts.set(&plain(IrqIndex::MSIX, 0, 1, IrqAction::Trigger), vec![]).unwrap();
    let writer = std::thread::spawn({
        let interrupts = interrupts.clone();
        move || interrupts.trigger(IrqIndex::MSIX, 0)
    });
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!writer.is_finished());
    // Not even unbinding it first hides it.
    interrupts.set(&plain(IrqIndex::MSIX, 0, 0, IrqAction::Trigger), vec![]).unwrap();
    interrupts.close();
    writer.join().unwrap();
}

/// Conformance point 43: one that blocks from the start and is full holds nobody.
#[test]
fn a_full_eventfd_is_not_waited_for() {
    let interrupts = Interrupts::new(&COUNTS);
    let full = EventFd::from_flags(EfdFlags::empty()).unwrap();
    full.write(u64::MAX - 1).unwrap();
    bind(&interrupts, IrqIndex::MSIX, 0, &[&full]).unwrap();
    interrupts.trigger(IrqIndex::MSIX, 0);
    assert_eq!(full.read().unwrap(), u64::MAX - 1);
    interrupts.trigger(IrqIndex::MSIX, 0);
    assert_eq!(full.read().unwrap(), 1);
}

#[derive(Clone, Debug)]
enum Step {
    Bind(u32, u32),
    Unbind(u32, u32),
    Disable,
    Mask(u32, u32),
    Unmask(u32, u32),
    Loopback(u32, u32),
    Raise(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0_u32..8).prop_flat_map(|start| (Just(start), 1..=8 - start));
    prop_oneof![
        range().prop_map(|(s, c)| Step::Bind(s, c)),
        range().prop_map(|(s, c)| Step::Unbind(s, c)),
        Just(Step::Disable),
        range().prop_map(|(s, c)| Step::Mask(s, c)),
        range().prop_map(|(s, c)| Step::Unmask(s, c)),
        range().prop_map(|(s, c)| Step::Loopback(s, c)),
        (0_usize..8).prop_map(Step::Raise),
    ]
}

proptest! {
    /// Against a model that keeps a count for each descriptor ever bound.
    #[test]
    fn every_interrupt_arrives_where_a_simple_model_says(steps in prop::collection::vec(step(), 0..60)) {
        let interrupts = Interrupts::new(&COUNTS);
        let mut fds = Vec::new();
        let mut expected: Vec<u64> = Vec::new();
        // (bound descriptor, masked, pending) of each vector
        let mut model = [(None::<usize>, false, false); 8];
        for step in steps {
            match step {
                Step::Bind(start, count) => {
                    let first = fds.len();
                    fds.extend((0..count).map(|_| eventfd()));
                    expected.resize(fds.len(), 0);
                    bind(&interrupts, IrqIndex::MSIX, start, &fds[first..].iter().collect::<Vec<_>>()).unwrap();
                    for i in 0..count as usize {
                        model[start as usize + i].0 = Some(first + i);
                    }
                }
                Step::Unbind(start, count) => {
                    let data = IrqData::Unbind;
                    let request = SetIrqs { data, ..plain(IrqIndex::MSIX, start, count, IrqAction::Trigger) };
                    interrupts.set(&request, vec![]).unwrap();
                    model[start as usize..(start + count) as usize].iter_mut().for_each(|v| v.0 = None);
                }
                Step::Disable => {
                    interrupts.set(&plain(IrqIndex::MSIX, 0, 0, IrqAction::Trigger), vec![]).unwrap();
                    model = Default::default();
                }
                Step::Mask(start, count) => {
                    interrupts.set(&plain(IrqIndex::MSIX, start, count, IrqAction::Mask), vec![]).unwrap();
                    model[start as usize..(start + count) as usize].iter_mut().for_each(|v| v.1 = true);
                }
                Step::Unmask(start, count) => {
                    interrupts.set(&plain(IrqIndex::MSIX, start, count, IrqAction::Unmask), vec![]).unwrap();
                    for (fd, masked, pending) in &mut model[start as usize..(start + count) as usize] {
                        if let (true, Some(fd)) = (*pending, *fd) {
                            expected[fd] += 1;
                        }
                        (*masked, *pending) = (false, false);
                    }
                }
                Step::Loopback(start, count) => {
                    interrupts.set(&plain(IrqIndex::MSIX, start, count, IrqAction::Trigger), vec![]).unwrap();
                    model[start as usize..(start + count) as usize]
                        .iter().filter_map(|v| v.0).for_each(|fd| expected[fd] += 1);
                }
                Step::Raise(vector) => {
                    interrupts.trigger(IrqIndex::MSIX, vector);
                    match &mut model[vector] {
                        (_, true, pending) => *pending = true,
                        (Some(fd), false, _) => expected[*fd] += 1,
                        (None, false, _) => {}
                    }
                }
            }
        }
        prop_assert_eq!(fds.iter().map(count).collect::<Vec<_>>(), expected);
    }
}

/// A client that takes the signal back before we do makes nobody wait.
#[test]
fn an_unmask_descriptor_that_is_empty_again_does_not_block() {
    let blocking = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap();
    let interrupts = Interrupts::new(&[1]);
    let set = SetIrqs {
        index: IrqIndex::INTX,
        start: 0,
        count: 1,
        data: IrqData::Eventfds,
        action: IrqAction::Unmask,
    };
    interrupts.set(&set, vec![blocking.as_fd().try_clone_to_owned().unwrap()]).unwrap();
    interrupts.unmasked();
    blocking.write(1).unwrap();
    interrupts.unmasked();
    blocking.write(1).unwrap();
    assert_eq!(blocking.read().unwrap(), 1, "the one before was taken");
}
