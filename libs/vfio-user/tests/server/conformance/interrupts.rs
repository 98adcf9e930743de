//! SET_IRQS.

use super::*;

fn signalled(eventfd: &EventFd) -> u64 {
    eventfd.read().unwrap_or(0)
}

/// Point 34, fault 4.
#[test]
fn set_irqs_refuses_what_has_no_meaning() {
    let (mut client, _served) = open(&Plain::new());
    let bound = eventfd();
    client.call(&Command::SetIrqs(bind(284, 1)), &[bound.as_fd()]).unwrap();
    let (none, boolean, eventfds, mask, unmask, trigger) = (1, 2, 4, 8, 16, 32);
    for body in [
        [20, none | trigger, 2, 284, u32::MAX],
        [20, none | trigger, 2, u32::MAX, 1],
        [20, none | trigger, 2, 1, u32::MAX],
        [20, none | trigger, 2, VECTORS, 1],
        [20, none | trigger, 2, VECTORS - 1, 2],
        [20, none | trigger, 2, 1, 0],
        [20, none | mask, 2, 0, 0],
        [20, eventfds | trigger, 2, 0, 0],
        [20, none | trigger, 5, 0, 1],
        [20, none | trigger, 1, 0, 1],
        [19, none | trigger, 2, 0, 1],
        [20, none, 2, 0, 1],
        [20, trigger, 2, 0, 1],
        [20, none | boolean | trigger, 2, 0, 1],
        [20, none | mask | unmask, 2, 0, 1],
        [20, boolean | trigger, 2, 0, 1],
        [20, none | mask, 3, 0, 1],
        [20, none | trigger, 4, 0, 2],
        [20, 64 | none | trigger, 2, 0, 1],
    ] {
        let result = client.call_raw(CommandCode::DEVICE_SET_IRQS, &dwords(body), &[]);
        assert_eq!(result.unwrap_err(), EINVAL, "{body:?}");
    }
    for (flags, count, given) in
        [(none | trigger, 1, 1), (eventfds | trigger, 2, 1), (eventfds | trigger, 1, 2)]
    {
        let spare = eventfd();
        let body = dwords([20, flags, 2, 0, count]);
        let result = client.call_raw(CommandCode::DEVICE_SET_IRQS, &body, &vec![spare.as_fd(); given]);
        assert_eq!(result.unwrap_err(), EINVAL);
        assert_eq!(copies(&spare), 1);
    }
    assert_eq!((signalled(&bound), copies(&bound)), (0, 2), "nothing was changed");
}

/// Points 35 to 42 and 44, faults 5 and 6, over the socket.
#[test]
fn vectors_are_bound_and_let_go() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let set =
        |index, start, count, data, action| Command::SetIrqs(SetIrqs { index, start, count, data, action });
    let vectors: Vec<EventFd> = (0..64).map(|_| eventfd()).collect();
    // In runs of 1, 8, and of 16 more than that: points 40 and 41.
    for run in [0..1, 1..9, 9..25, 25..64] {
        let borrowed: Vec<_> = vectors[run.clone()].iter().map(AsFd::as_fd).collect();
        client.call(&Command::SetIrqs(bind(run.start as u32, run.len() as u32)), &borrowed).unwrap();
    }
    let (err, req, intx) = (eventfd(), eventfd(), eventfd());
    for (index, eventfd) in [(IrqIndex::ERR, &err), (IrqIndex::REQ, &req), (IrqIndex::INTX, &intx)] {
        let command = set(index, 0, 1, IrqData::Eventfds, IrqAction::Trigger);
        client.call(&command, &[eventfd.as_fd()]).unwrap();
    }
    let fired = |vector: usize| signalled(&vectors[vector]);
    let interrupts = device.connection();
    let raise = |index, vector| interrupts.interrupts().trigger(index, vector);
    for vector in 0..64 {
        raise(IrqIndex::MSIX, vector);
        assert_eq!(fired(vector), 1);
    }
    raise(IrqIndex::ERR, 0);
    assert_eq!((signalled(&err), signalled(&req), fired(0)), (1, 0, 0));
    raise(IrqIndex::REQ, 0);
    assert_eq!((signalled(&err), signalled(&req), fired(0)), (0, 1, 0));
    // Loop-back by NONE and BOOL; unbound ones are nobody's.
    client.call(&set(IrqIndex::MSIX, 62, 4, IrqData::None, IrqAction::Trigger), &[]).unwrap();
    client.call(&set(IrqIndex::MSIX, 61, 3, IrqData::Bool(&[1, 0, 1]), IrqAction::Trigger), &[]).unwrap();
    assert_eq!([61, 62, 63].map(fired), [1, 1, 2]);
    // Masked vectors wait.
    client.call(&set(IrqIndex::MSIX, 3, 1, IrqData::None, IrqAction::Mask), &[]).unwrap();
    raise(IrqIndex::MSIX, 3);
    assert_eq!(fired(3), 0);
    client.call(&set(IrqIndex::MSIX, 3, 1, IrqData::None, IrqAction::Unmask), &[]).unwrap();
    assert_eq!(fired(3), 1);
    // Letting go of some: exactly those.
    client.call(&set(IrqIndex::MSIX, 5, 2, IrqData::Unbind, IrqAction::Trigger), &[]).unwrap();
    assert_eq!([4, 5, 6, 7].map(|vector| copies(&vectors[vector])), [2, 1, 1, 2]);
    client.call(&set(IrqIndex::MSIX, 100, 1, IrqData::Unbind, IrqAction::Trigger), &[]).unwrap();
    // Another one instead: the old one is closed.
    let other = eventfd();
    client.call(&Command::SetIrqs(bind(7, 1)), &[other.as_fd()]).unwrap();
    raise(IrqIndex::MSIX, 7);
    assert_eq!((fired(7), signalled(&other), copies(&vectors[7])), (0, 1, 1));
    // Disabling an index leaves the others alone.
    client.call(&set(IrqIndex::INTX, 0, 0, IrqData::None, IrqAction::Trigger), &[]).unwrap();
    assert_eq!((copies(&intx), copies(&vectors[0]), copies(&err)), (1, 2, 2));
    client.call(&set(IrqIndex::MSIX, 0, 0, IrqData::None, IrqAction::Trigger), &[]).unwrap();
    assert!(vectors.iter().all(|vector| copies(vector) == 1));
    assert_eq!((copies(&err), copies(&req)), (2, 2));
}

/// Point 42: the client's resample descriptor unmasks the pin, which fires again while it is asserted.
#[test]
fn the_pin_is_resampled_through_its_descriptor() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let (trigger, unmask) = (eventfd(), eventfd());
    for (action, eventfd) in [(IrqAction::Trigger, &trigger), (IrqAction::Unmask, &unmask)] {
        let set = SetIrqs { index: IrqIndex::INTX, start: 0, count: 1, data: IrqData::Eventfds, action };
        client.call(&Command::SetIrqs(set), &[eventfd.as_fd()]).unwrap();
    }
    let connection = device.connection();
    connection.interrupts().set_line(true);
    assert_eq!(signalled(&trigger), 1);
    connection.interrupts().set_line(true);
    assert_eq!(signalled(&trigger), 0, "masked until it is unmasked");
    // Also while the socket is busy all the time.
    unmask.write(1).unwrap();
    eventually("it fires again", || {
        client.read(REGISTERS, 0, 4).unwrap();
        signalled(&trigger) == 1
    });
    connection.interrupts().set_line(false);
    unmask.write(1).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert_eq!(signalled(&trigger), 0);
}
