use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;
use crate::controller::data::DataPointer;
use crate::controller::tests::machine::Memory;
use crate::controller::{DmaError, Segment};
use crate::spec::SglIdentifier;

/// Descriptors that the memory holds.
const SLOTS: u64 = 96;

/// Memory of which another descriptor is different after each read, if its dice are thrown.
struct Guest {
    memory: Memory,
    dice: Option<u64>,
    reads: usize,
}

impl Guest {
    fn new(descriptors: &[SglDescriptor]) -> Self {
        let mut memory = Memory::new(0x1_0000);
        memory.bytes[..size_of_val(descriptors)].copy_from_slice(descriptors.as_bytes());
        Self { memory, dice: None, reads: 0 }
    }
}

impl Host for Guest {
    fn read(&mut self, at: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        self.reads += 1;
        self.memory.read(at, into)?;
        if let Some(dice) = &mut self.dice {
            *dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let slots = self.memory.bytes[..SLOTS as usize * 16].as_chunks_mut::<16>().0;
            let (from, to) = (*dice >> 40, *dice >> 20 & 0xfffff);
            slots[(to % SLOTS) as usize] = slots[(from % SLOTS) as usize];
        }
        Ok(())
    }
    fn write(&mut self, at: Iova, from: &[u8]) -> Result<(), DmaError> {
        self.memory.write(at, from)
    }
    fn load(&mut self, at: Iova) -> Result<u32, DmaError> {
        self.memory.load(at)
    }
    fn store(&mut self, at: Iova, value: u32) -> Result<(), DmaError> {
        self.memory.store(at, value)
    }
    fn publish(&mut self, at: Iova, entry: [u32; 4]) -> Result<(), DmaError> {
        self.memory.publish(at, entry)
    }
    fn doorbell(&mut self, index: usize) -> u32 {
        self.memory.doorbell(index)
    }
    fn set_doorbell(&mut self, index: usize, value: u32) {
        self.memory.set_doorbell(index, value);
    }
    fn interrupt(&mut self, vector: u16) {
        self.memory.interrupt(vector);
    }
    fn interrupt_line(&mut self, asserted: bool) {
        self.memory.interrupt_line(asserted);
    }
}

/// What section 4.4 says: of each byte of data where it goes, none if nowhere. Segments are read whole.
fn model(
    host: &mut impl Host,
    first: SglDescriptor,
    length: usize,
    direction: Direction,
) -> Result<Vec<Option<u64>>, Status> {
    let mut bytes = Vec::new();
    let mut segment = vec![first];
    let mut last = false;
    let mut segments = 0;
    loop {
        let mut link = None;
        for (place, descriptor) in segment.iter().enumerate() {
            let (address, size) = (descriptor.address.get(), u64::from(descriptor.length.get()));
            let wraps = address.checked_add(size).is_none();
            let more = size.min((length - bytes.len()) as u64);
            match (descriptor.identifier.bits(), direction) {
                (0x00, _) if wraps => return Err(Status::INVALID_SGL_LENGTH),
                (0x00, _) => bytes.extend((0..more).map(|byte| Some(address + byte))),
                (0x10, Direction::ToHost) => bytes.extend((0..more).map(|_| None)),
                (0x10, Direction::FromHost) => {}
                (0x20 | 0x30, _) if wraps || size == 0 || size % 16 != 0 || address % 8 != 0 => {
                    return Err(Status::INVALID_SGL_SEGMENT);
                }
                (0x20 | 0x30, _) if place + 1 != segment.len() => return Err(Status::INVALID_SGL_COUNT),
                (0x20 | 0x30, _) if last => return Err(Status::INVALID_SGL_SEGMENT),
                (0x20 | 0x30, _) => link = Some(*descriptor),
                _ => return Err(Status::INVALID_SGL_TYPE),
            }
            if bytes.len() == length {
                return Ok(bytes);
            }
        }
        let link = link.ok_or(Status::INVALID_SGL_LENGTH)?;
        segments += 1;
        if segments > MAX_SGL_SEGMENTS {
            return Err(Status::INVALID_SGL_COUNT);
        }
        last = link.identifier.kind() == SglType::LAST_SEGMENT;
        segment = vec![SglDescriptor::default(); link.length.get() as usize / 16];
        host.read(Iova(link.address.get()), segment.as_mut_bytes())
            .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
    }
}

fn bytes(segments: &[Segment]) -> Vec<Option<u64>> {
    let bytes = |segment: &Segment| {
        let Segment { iova, length } = *segment;
        (0..length as u64).map(move |byte| iova.map(|iova| iova.0 + byte))
    };
    segments.iter().flat_map(bytes).collect()
}

fn walk(
    host: &mut impl Host,
    first: SglDescriptor,
    length: usize,
    direction: Direction,
) -> Result<Vec<Segment>, Status> {
    let mut walker = Walker::new(1 << 20);
    walker.walk(host, DataPointer::Sgl(first), length, direction).map(<[Segment]>::to_vec)
}

/// Descriptors of which most make sense.
fn descriptor() -> impl Strategy<Value = SglDescriptor> {
    let block = (0_u64..0x2000, 0_u32..600).prop_map(|(at, size)| (SglType::DATA_BLOCK, at, size));
    let bucket = (0_u32..300).prop_map(|size| (SglType::BIT_BUCKET, 0, size));
    let kind = prop_oneof![3 => Just(SglType::SEGMENT), 1 => Just(SglType::LAST_SEGMENT)];
    let link = (kind, 0..SLOTS, 1_u32..12).prop_map(|(kind, slot, count)| (kind, slot * 16, count * 16));
    let odd = (0_u8..6, any::<u64>(), any::<u32>()).prop_map(|(kind, at, size)| (SglType(kind), at, size));
    let crooked = (2_u8..4, 0_u64..1024, 0_u32..40).prop_map(|(kind, at, size)| (SglType(kind), at, size));
    prop_oneof![
        60 => block,
        5 => bucket,
        12 => link,
        1 => odd,
        1 => crooked,
        1 => Just((SglType::SEGMENT, 1 << 40, 16)),
    ]
    .prop_map(|(kind, at, size)| SglDescriptor::new(kind, at, size))
}

fn subtyped() -> impl Strategy<Value = SglDescriptor> {
    (descriptor(), prop::option::weighted(0.01, 1_u8..16)).prop_map(|(descriptor, subtype)| SglDescriptor {
        identifier: descriptor.identifier.with_subtype_bits(subtype.unwrap_or(0)),
        ..descriptor
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Loops, lists that change under the walk, wrong lengths: the answer is the model's, which reads the same
    /// segments in the same order, each once.
    #[test]
    fn a_walk_is_what_the_specification_says(
        first in prop_oneof![
            4 => (any::<bool>(), 0..SLOTS, 1_u32..12).prop_map(|(last, slot, count)| {
                let kind = if last { SglType::LAST_SEGMENT } else { SglType::SEGMENT };
                SglDescriptor::new(kind, slot * 16, count * 16)
            }),
            1 => subtyped(),
        ],
        descriptors in prop::collection::vec(subtyped(), SLOTS as usize),
        length in prop_oneof![1_usize..2000, Just(512), Just(4096)],
        to_host: bool,
        dice in prop::option::of(any::<u64>()),
    ) {
        let direction = if to_host { Direction::ToHost } else { Direction::FromHost };
        let mut hosts = [Guest::new(&descriptors), Guest::new(&descriptors)];
        hosts.iter_mut().for_each(|host| host.dice = dice);
        let [one, other] = &mut hosts;
        let expected = model(one, first, length, direction);
        let walked = walk(other, first, length, direction);
        if let Ok(segments) = &walked {
            prop_assert!(segments.iter().all(|segment| segment.length != 0));
        }
        prop_assert_eq!(walked.map(|segments| bytes(&segments)), expected);
        prop_assert_eq!(other.reads, one.reads);
    }

    /// Anything at all as memory: no panic, an end, and a success covers the length.
    #[test]
    fn any_list_ends(first: [u8; 16], memory in prop::collection::vec(any::<u8>(), 4096), length in 1..=1_usize << 20) {
        let mut host = Guest::new(&[]);
        host.memory.bytes[..4096].copy_from_slice(&memory);
        host.dice = Some(3);
        let first = SglDescriptor::read_from_bytes(&first).unwrap();
        if let Ok(segments) = walk(&mut host, first, length, Direction::ToHost) {
            prop_assert_eq!(segments.iter().map(|segment| segment.length).sum::<usize>(), length);
        }
        prop_assert!(host.reads <= MAX_SGL_SEGMENTS + MAX_SGL_DESCRIPTORS * 16 / 4096);
    }
}

fn block(at: u64, length: u32) -> SglDescriptor {
    SglDescriptor::new(SglType::DATA_BLOCK, at, length)
}

fn last_segment(at: u64, descriptors: u32) -> SglDescriptor {
    SglDescriptor::new(SglType::LAST_SEGMENT, at, descriptors * 16)
}

#[test]
fn runs_that_join_are_one_segment() {
    let descriptors = [block(0x801, 511), block(0xa00, 1), block(7, 0), block(0xa01, 512), block(0x801, 512)];
    let mut host = Guest::new(&descriptors);
    let segment = |at, length| Segment { iova: Some(Iova(at)), length };
    assert_eq!(
        walk(&mut host, last_segment(0, 5), 1536, Direction::FromHost),
        Ok(vec![segment(0x801, 1024), segment(0x801, 512)])
    );
    // At the end of the address space the next is not at its beginning.
    let mut host = Guest::new(&[block(u64::MAX - 512, 512), block(0, 512)]);
    assert_eq!(
        walk(&mut host, last_segment(0, 2), 1024, Direction::FromHost),
        Ok(vec![segment(u64::MAX - 512, 512), segment(0, 512)])
    );
}

#[test]
fn as_many_descriptors_as_the_limit_says() {
    let run = |count: usize| {
        let mut descriptors = vec![block(0, 0); count];
        *descriptors.last_mut().unwrap() = block(0x100, 512);
        let mut host = Guest::new(&descriptors);
        let result = walk(&mut host, last_segment(0, count as u32), 512, Direction::ToHost);
        (result.map(|segments| segments.len()), host.reads)
    };
    assert_eq!(run(MAX_SGL_DESCRIPTORS), (Ok(1), 8));
    assert_eq!(run(MAX_SGL_DESCRIPTORS + 1), (Err(Status::INVALID_SGL_COUNT), 8));
}

#[test]
fn as_many_segments_as_the_limit_says() {
    let run = |count: u64| {
        // Each is one descriptor that points to the next, the last one is data.
        let mut chain: Vec<_> =
            (1..count).map(|next| SglDescriptor::new(SglType::SEGMENT, next * 16, 16)).collect();
        chain.push(block(0x100, 512));
        let first = SglDescriptor::new(SglType::SEGMENT, 0, 16);
        walk(&mut Guest::new(&chain), first, 512, Direction::ToHost).map(|segments| segments.len())
    };
    assert_eq!(run(MAX_SGL_SEGMENTS as u64), Ok(1));
    assert_eq!(run(MAX_SGL_SEGMENTS as u64 + 1), Err(Status::INVALID_SGL_COUNT));
}

#[test]
fn every_error_has_its_status() {
    let keyed = SglDescriptor::new(SglType::KEYED_DATA_BLOCK, 0, 512);
    let transport = SglDescriptor::new(SglType::TRANSPORT_DATA_BLOCK, 0, 512);
    let offset = SglDescriptor { identifier: SglIdentifier::from_bits(0x01), ..block(0, 512) };
    let segment = |at, length| SglDescriptor::new(SglType::SEGMENT, at, length);
    for (first, list, expected) in [
        (keyed, vec![], Status::INVALID_SGL_TYPE),
        (transport, vec![], Status::INVALID_SGL_TYPE),
        (offset, vec![], Status::INVALID_SGL_TYPE),
        (SglDescriptor::new(SglType::VENDOR, 0, 512), vec![], Status::INVALID_SGL_TYPE),
        (last_segment(0, 2), vec![block(0, 256), keyed], Status::INVALID_SGL_TYPE),
        (block(0, 511), vec![], Status::INVALID_SGL_LENGTH),
        (block(u64::MAX - 510, 512), vec![], Status::INVALID_SGL_LENGTH),
        (last_segment(0, 2), vec![block(0, 256), block(0, 255)], Status::INVALID_SGL_LENGTH),
        (segment(0, 0), vec![], Status::INVALID_SGL_SEGMENT),
        (segment(0, 24), vec![], Status::INVALID_SGL_SEGMENT),
        (segment(4, 16), vec![], Status::INVALID_SGL_SEGMENT),
        (segment(u64::MAX - 7, 16), vec![], Status::INVALID_SGL_SEGMENT),
        (last_segment(0, 1), vec![segment(16, 16), block(0, 512)], Status::INVALID_SGL_SEGMENT),
        (segment(0, 48), vec![block(0, 1), last_segment(16, 1), block(0, 512)], Status::INVALID_SGL_COUNT),
        (segment(0, 16), vec![segment(0, 16)], Status::INVALID_SGL_COUNT),
        (segment(1 << 40, 16), vec![], Status::DATA_TRANSFER_ERROR),
    ] {
        let mut host = Guest::new(&list);
        assert_eq!(walk(&mut host, first, 512, Direction::ToHost), Err(expected), "{first:?} {list:?}");
    }
}

#[test]
fn a_bit_bucket_takes_bytes_from_the_drive_only() {
    let bucket = |length| SglDescriptor::new(SglType::BIT_BUCKET, 0, length);
    let list = [block(0x100, 100), bucket(200), bucket(12), block(0x400, 200)];
    let mut host = Guest::new(&list);
    let data = |at, length| Segment { iova: Some(Iova(at)), length };
    assert_eq!(
        walk(&mut host, last_segment(0, 4), 512, Direction::ToHost),
        Ok(vec![data(0x100, 100), Segment { iova: None, length: 212 }, data(0x400, 200)])
    );
    assert_eq!(
        walk(&mut host, last_segment(0, 4), 300, Direction::FromHost),
        Ok(vec![data(0x100, 100), data(0x400, 200)])
    );
}
