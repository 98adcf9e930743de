//! The client against a server that lies, with several callers at once. Alone in its binary: it counts this
//! process's descriptors.
//!
//! Whatever the server does, each call ends in the one way that fits what the server did with that call's command,
//! whoever else calls meanwhile; the server gets at what is mapped and at nothing else; nothing stays open.

mod server;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::EventFd;
use outboard_vfio_user::client::{Client, ClientError, Delivery, Map, Memory, Options, Sharing};
use outboard_vfio_user::dma::Iova;
use outboard_vfio_user::memory::{Access, SharedMemory};
use outboard_vfio_user::wire::{CommandCode, IrqIndex, RegionWrite};
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::Index;
use vm_memory::Bytes;

use server::{Break, Key, Lie, Log, NOWHERE, PAGE, Question, Server, WRITTEN, data_at, good};

const TIMEOUT: Duration = Duration::from_millis(250);
const PATIENCE: Duration = Duration::from_secs(20);
const CALLERS: u64 = 3;
const CALLS: u64 = 16;
/// The most maps in a batch.
const BATCH: u64 = 6;

#[derive(Clone, Copy, Debug)]
enum Call {
    Read(u16),
    Write,
    WriteMulti(u8),
    Region,
    IoFds,
    Irq,
    Bind,
    Maps(u8),
    /// All that this caller has mapped.
    Unmaps,
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        6 => (1..2000_u16).prop_map(Call::Read),
        2 => Just(Call::Write),
        1 => (1..=200_u8).prop_map(Call::WriteMulti),
        1 => Just(Call::Region),
        1 => Just(Call::IoFds),
        1 => Just(Call::Irq),
        1 => Just(Call::Bind),
        3 => (1..=BATCH as u8).prop_map(Call::Maps),
        2 => Just(Call::Unmaps),
    ]
}

fn lie() -> impl Strategy<Value = Lie> {
    let question = prop_oneof![
        3 => any::<u8>().prop_map(Question::Read),
        3 => any::<u8>().prop_map(Question::Write),
        1 => any::<u8>().prop_map(Question::Across),
        1 => Just(Question::ReadNowhere),
        1 => Just(Question::WriteNowhere),
        1 => Just(Question::Nonsense),
    ];
    prop_oneof![
        40 => Just(Lie::Honest),
        10 => Just(Lie::Pieces),
        20 => Just(Lie::Late),
        40 => question.prop_map(Lie::Ask),
        10 => (1..34_u8).prop_map(Lie::Refuse),
        6 => Just(Lie::Short),
        6 => Just(Lie::Long),
        6 => Just(Lie::Echo),
        6 => (1..4_u8).prop_map(Lie::Descriptors),
        2 => Just(Lie::Silent),
    ]
}

fn way() -> impl Strategy<Value = Break> {
    prop_oneof![
        Just(Break::WrongId),
        Just(Break::WrongCommand),
        Just(Break::WrongType),
        prop_oneof![0..16_u32, (1 << 21)..=u32::MAX].prop_map(Break::Size),
        Just(Break::Twice),
        Just(Break::Garbage),
        Just(Break::Close),
        Just(Break::CloseTwin),
        Just(Break::WrongSocket),
    ]
}

/// What the server does, in order; at one point it may break the connection.
fn lies() -> impl Strategy<Value = Vec<Lie>> {
    (vec(lie(), 0..80), weighted(0.6, (any::<Index>(), way()))).prop_map(|(mut lies, end)| {
        if let Some((at, way)) = end {
            lies.insert(at.index(lies.len() + 1), Lie::Break(way));
        }
        lies
    })
}

/// What became of one command, and how long its call took.
struct Outcome {
    key: Key,
    result: Result<(), ClientError>,
    took: Duration,
}

/// One of the callers.
struct Caller<'a> {
    client: Client,
    memory: &'a SharedMemory,
    number: u64,
    mapped: Vec<u64>,
    outcomes: Vec<Outcome>,
}

/// Memory that nobody else has, at an address that nobody else uses. Every other may only be read.
fn map_of(memory: &SharedMemory, number: u64) -> Map<'_> {
    let access = if number.is_multiple_of(2) { Access::ReadWrite } else { Access::Read };
    let part = Memory { file: memory.as_fd(), offset: number * PAGE, length: PAGE as usize };
    Map { iova: Iova((number + 1) << 20), memory: part, access, sharing: Sharing::Messages }
}

impl Caller<'_> {
    /// Numbers that no other call has: of the `number`th call, the first of `BATCH`.
    fn run(mut self, calls: &[Call]) -> Self {
        for (call, index) in calls.iter().zip(0..CALLS) {
            self.call(*call, (self.number * CALLS + index) * BATCH);
        }
        self
    }

    fn call(&mut self, call: Call, number: u64) {
        let begin = Instant::now();
        let client = self.client.clone();
        let (offset, index) = (number << 16, number as u32);
        let ends = |code: CommandCode, of: u64, result| vec![(Key(code.0, of), result)];
        let results = match call {
            Call::Read(count) => {
                let mut data = vec![0; count.into()];
                let result = client.region_read(0, offset, &mut data).map(|()| {
                    assert_eq!(data, data_at(offset, count.into()), "another's data");
                });
                ends(CommandCode::REGION_READ, offset, result)
            }
            Call::Write => {
                let result = client.region_write(0, offset, &[1; 8], Delivery::Replied);
                ends(CommandCode::REGION_WRITE, offset, result)
            }
            Call::WriteMulti(count) => {
                let writes: Vec<_> = (0..u64::from(count))
                    .map(|at| RegionWrite { offset: offset + at, region: 0, data: &[1] })
                    .collect();
                let result = client.region_write_multi(&writes, Delivery::Replied);
                ends(CommandCode::REGION_WRITE_MULTI, offset, result)
            }
            Call::Region => {
                let result = client.region(index).map(|region| assert_eq!(region.info().index, index));
                ends(CommandCode::DEVICE_GET_REGION_INFO, index.into(), result)
            }
            Call::IoFds => {
                let result = client.region_io_fds(index).map(|(entries, _)| assert_eq!(entries, []));
                ends(CommandCode::DEVICE_GET_REGION_IO_FDS, index.into(), result)
            }
            Call::Irq => {
                let result =
                    client.irq_info(IrqIndex(index)).map(|info| assert_eq!(info.count, index % 2048));
                ends(CommandCode::DEVICE_GET_IRQ_INFO, index.into(), result)
            }
            Call::Bind => {
                let eventfd = EventFd::new().unwrap();
                let result = client.bind_vectors(IrqIndex::MSIX, index, &[eventfd.as_fd()]);
                ends(CommandCode::DEVICE_SET_IRQS, index.into(), result)
            }
            Call::Maps(count) => {
                let maps: Vec<_> = (0..u64::from(count)).map(|at| map_of(self.memory, number + at)).collect();
                let results = client.dma_map_batch(&maps);
                assert_eq!(results.len(), maps.len());
                let places = maps.iter().map(|map| map.iova.0);
                let mapped = places.clone().zip(&results).filter(|(_, result)| result.is_ok());
                self.mapped.extend(mapped.map(|(place, _)| place));
                places.map(|place| Key(CommandCode::DMA_MAP.0, place)).zip(results).collect()
            }
            Call::Unmaps => {
                let places = std::mem::take(&mut self.mapped);
                let ranges: Vec<_> = places.iter().map(|&place| (Iova(place), PAGE)).collect();
                let results = client.dma_unmap_batch(&ranges);
                assert_eq!(results.len(), ranges.len());
                places.into_iter().map(|place| Key(CommandCode::DMA_UNMAP.0, place)).zip(results).collect()
            }
        };
        let took = begin.elapsed();
        self.outcomes.extend(results.into_iter().map(|(key, result)| Outcome { key, result, took }));
    }
}

/// Whether a call may end like this, for what the server did.
fn fits(log: &Log, Outcome { key, result, took }: &Outcome) -> bool {
    let code = CommandCode(key.0);
    match result {
        Err(ClientError::Disconnected(_)) => return log.broken.is_some(),
        // On a busy machine anything may take too long. One timeout is for a batch as a whole.
        Err(ClientError::TimedOut { after, .. }) => return *after == TIMEOUT && *took >= TIMEOUT,
        _ => {}
    }
    let Some(&lie) = log.lies.get(key) else { return false };
    let header_only =
        [CommandCode::DMA_MAP, CommandCode::DEVICE_SET_IRQS, CommandCode::DEVICE_RESET].contains(&code);
    let region_info = code == CommandCode::DEVICE_GET_REGION_INFO;
    let malformed = matches!(result, Err(ClientError::Malformed { .. } | ClientError::Mismatch { .. }));
    match lie {
        Lie::Short if !header_only => malformed,
        Lie::Echo if !header_only => malformed,
        // What follows the fixed part of a region's information is passed over.
        Lie::Long if !region_info => malformed,
        Lie::Descriptors(1) if region_info => result.is_ok(),
        Lie::Descriptors(count) => {
            matches!(result, Err(ClientError::Descriptors { count: came, .. }) if *came == usize::from(count))
        }
        Lie::Refuse(errno) => {
            let errno = Errno::from_raw(errno.into());
            matches!(result, Err(ClientError::Refused { errno: came, code: of }) if (*came, *of) == (errno, code))
        }
        Lie::Silent => false,
        // Its reply was good; what followed it was not.
        Lie::Break(Break::Twice) => result.is_ok(),
        Lie::Break(_) => false,
        _ => good(lie) && result.is_ok() || lie == Lie::Echo || lie == Lie::Long,
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn check(calls: &[Vec<Call>], lies: Vec<Lie>, twin: bool) {
    let descriptors = open_descriptors();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (look, places) = channel();
    let liar = thread::spawn(move || Server::new(theirs, lies, places).run(twin));
    // Patient on a busy machine, except where it is about patience.
    let patient =
        Client::new(ours, Options { timeout: PATIENCE, twin_socket: twin, ..Options::default() }).unwrap();
    let client = patient.with_timeout(TIMEOUT);
    let count = CALLERS * CALLS * BATCH;
    let memory = SharedMemory::new("guest", (count * PAGE) as usize).unwrap();
    for number in 0..count {
        memory.bytes().write_obj(map_of(&memory, number).iova.0, (number * PAGE) as usize).unwrap();
    }
    let callers: Vec<Caller<'_>> = thread::scope(|scope| {
        let (client, memory) = (&client, &memory);
        let start = |(calls, number): (&'_ Vec<Call>, u64)| {
            let (client, calls) = (client.clone(), calls.clone());
            let caller = Caller { client, memory, number, mapped: Vec::new(), outcomes: Vec::new() };
            scope.spawn(move || caller.run(&calls))
        };
        let threads: Vec<_> = calls.iter().zip(0..).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let outcomes: Vec<Outcome> = callers.into_iter().flat_map(|caller| caller.outcomes).collect();

    // What is mapped by what the callers were told.
    let mut mapped: BTreeMap<u64, bool> = BTreeMap::new();
    for Outcome { key: Key(code, place), result, .. } in &outcomes {
        match CommandCode(*code) {
            CommandCode::DMA_MAP => drop(mapped.insert(*place, result.is_ok())),
            CommandCode::DMA_UNMAP if result.is_ok() => drop(mapped.insert(*place, false)),
            CommandCode::DMA_UNMAP => {
                let nothing = matches!(result, Err(ClientError::Refused { errno: Errno::ENOENT, .. }));
                mapped.insert(*place, !nothing);
            }
            _ => {}
        }
    }
    // A server whose connection is over does not look.
    let _ = look.send(mapped.keys().copied().chain([0, NOWHERE]).collect());
    let alive = patient.reset().is_ok();
    let sent = client.sent().total();
    drop((patient, client));
    let log = liar.join().unwrap();
    match log.broken {
        None => assert!(alive, "a connection that nobody broke is over"),
        // Of the other socket's end the client may hear later.
        Some(Break::CloseTwin) => {}
        Some(way) => assert!(!alive, "{way:?} was overlooked"),
    }

    for outcome in &outcomes {
        let Outcome { key, result, took } = outcome;
        assert!(fits(&log, outcome), "{key:?}: {:?} {result:?} after {took:?}", log.lies.get(key));
    }
    if alive {
        // VERSION was not counted there. A message that its caller has given up on is still sent.
        assert_eq!(log.received + 1, sent);
        let expected = |place: &u64| mapped.get(place).copied().unwrap_or(false);
        for (place, answer) in &log.swept {
            let right =
                if expected(place) { Ok(place.to_le_bytes().to_vec()) } else { Err(Errno::EFAULT as u32) };
            assert_eq!(answer, &right, "{place:#x}");
        }
    }
    let was_mapped = |place: u64| {
        let of = Key(CommandCode::DMA_MAP.0, place);
        outcomes.iter().any(|outcome| outcome.key == of && outcome.result.is_ok())
    };
    for asked in &log.asked {
        let efault = Err(Errno::EFAULT as u32);
        let expected = match (asked.question, asked.of) {
            // The end came first.
            _ if asked.answer == Err(u32::MAX) => continue,
            (Question::ReadNowhere | Question::WriteNowhere | Question::Across(_), _) => efault,
            (Question::Nonsense, _) => Err(Errno::ENOSYS as u32),
            // Its caller had given up when it was mapped.
            (_, Some((place, _))) if !was_mapped(place) => continue,
            (Question::Read(_), Some((place, _))) => Ok(place.to_le_bytes().to_vec()),
            (Question::Write(_), Some((place, Access::ReadWrite))) => {
                let at = (((place >> 20) - 1) * PAGE + WRITTEN) as usize;
                assert_eq!(memory.bytes().read_obj::<[u8; 8]>(at).unwrap(), [0x77; 8]);
                Ok(Vec::new())
            }
            (Question::Write(_), _) => efault,
            (question, None) => panic!("{question:?}"),
        };
        assert_eq!(asked.answer, expected, "{asked:?}");
    }
    drop(memory);
    assert_eq!(open_descriptors(), descriptors, "something stays open");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 50, ..ProptestConfig::default() })]

    #[test]
    fn every_call_ends_as_the_server_had_it(
        calls in vec(vec(call(), 1..=CALLS as usize), CALLERS as usize),
        lies in lies(),
        twin: bool,
    ) {
        check(&calls, lies, twin);
    }
}
