use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use zerocopy::FromBytes;

use super::*;
use crate::wire::{DmaAccess, Header, Reply, encode_error};

fn header_of(message: &[u8]) -> Header {
    Header::read_from_prefix(message).unwrap().0
}

/// What a server may do, well or badly.
#[derive(Clone, Debug)]
enum Step {
    Request,
    Post,
    /// Answers one of those that wait.
    Answer(prop::sample::Index, bool),
    DmaRead,
    Bogus(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Request),
        1 => Just(Step::Post),
        4 => any::<(prop::sample::Index, bool)>().prop_map(|(index, fails)| Step::Answer(index, fails)),
        1 => Just(Step::DmaRead),
        1 => (60_000..u16::MAX).prop_map(Step::Bogus),
    ]
}

proptest! {
    /// Against a list of who waits for what: every waiter gets its own reply, once, in any order.
    #[test]
    fn replies_find_their_waiters(steps in vec(step(), 1..60), cut in 1..40_usize) {
        let mut session = Session::new();
        let mut model = BTreeMap::new();
        for (number, step) in steps.into_iter().enumerate() {
            let arrives = match &step {
                Step::Request => {
                    let message = session.request(&Command::Reset, number).unwrap();
                    prop_assert!(model.insert(header_of(&message).id(), number).is_none());
                    continue;
                }
                Step::Post => {
                    let message = session.post(&Command::Reset);
                    prop_assert_eq!(header_of(&message).kind(), Kind::Command { no_reply: true });
                    prop_assert!(!model.contains_key(&header_of(&message).id()));
                    continue;
                }
                Step::Answer(..) if model.is_empty() => continue,
                Step::Answer(index, fails) => {
                    let (&id, _) = model.iter().nth(index.index(model.len())).unwrap();
                    if *fails {
                        encode_error(id, CommandCode::DEVICE_RESET, 22)
                    } else {
                        Reply::Done(CommandCode::DEVICE_RESET).encode(id)
                    }
                }
                Step::DmaRead => Command::DmaRead(DmaAccess { address: 0, count: 1 }).encode(7, false),
                Step::Bogus(id) => Reply::Done(CommandCode::DEVICE_RESET).encode(*id),
            };
            for piece in arrives.chunks(cut) {
                session.receive(piece, Vec::new());
            }
            let event = session.next_event();
            let id = header_of(&arrives).id();
            match step {
                Step::Answer(_, fails) => {
                    let expected = model.remove(&id).unwrap();
                    let Ok(Some(Event::Reply { waiter, error, .. })) = event else { panic!("{event:?}") };
                    prop_assert_eq!((waiter, error), (expected, fails.then_some(22)));
                }
                Step::DmaRead => {
                    let no_command = !matches!(event, Ok(Some(Event::Command { no_reply: false, .. })));
                    prop_assert!(!no_command);
                }
                _ => {
                    let code = CommandCode::DEVICE_RESET;
                    prop_assert_eq!(event.unwrap_err(), SessionError::UnexpectedReply { id, code });
                    break;
                }
            }
            prop_assert!(session.next_event().unwrap().is_none());
            prop_assert_eq!(session.pending(), model.len());
        }
    }

    #[test]
    fn random_servers_do_no_harm(bytes in vec(any::<u8>(), 0..200)) {
        let mut session = Session::new();
        session.request(&Command::Reset, ()).unwrap();
        session.receive(&bytes, Vec::new());
        while let Ok(Some(_)) = session.next_event() {}
    }
}

#[test]
fn ids_run_out_only_when_all_are_taken() {
    let mut session = Session::new();
    let mut ids: Vec<u16> = (0..=u16::MAX)
        .map(|number| header_of(&session.request(&Command::Reset, number).unwrap()).id())
        .collect();
    ids.sort_unstable();
    assert!(ids.iter().copied().eq(0..=u16::MAX));
    assert_eq!(session.request(&Command::Reset, 0), Err(TooManyCommands { count: 65536 }));
    session.post(&Command::Reset);
    session.receive(&Reply::Done(CommandCode::DEVICE_RESET).encode(300), Vec::new());
    assert!(matches!(session.next_event(), Ok(Some(Event::Reply { .. }))));
    assert_eq!(header_of(&session.request(&Command::Reset, 0).unwrap()).id(), 300);
}

#[test]
fn a_reply_names_what_it_answers() {
    let mut session = Session::new();
    let id = header_of(&session.request(&Command::Reset, ()).unwrap()).id();
    session.receive(&Reply::Done(CommandCode::DMA_MAP).encode(id), Vec::new());
    assert_eq!(
        session.next_event().unwrap_err(),
        SessionError::WrongCommand { id, sent: CommandCode::DEVICE_RESET, answered: CommandCode::DMA_MAP }
    );
    let mut message = Reply::Done(CommandCode::DMA_MAP).encode(id);
    message[8] = 2;
    session.receive(&message, Vec::new());
    assert_eq!(session.next_event().unwrap_err(), SessionError::InvalidType { kind: 2 });
}
