//! Every kind of storage against a vector of bytes.

use std::path::Path;
use std::str::FromStr;

use outboard_nvme::controller::{Disk, DiskError, LbaRange, Operation, Segment, Submission, Tag};
use outboard_nvme::{Iova, Lba};
use proptest::prelude::*;

use super::test_host::{BASE, TestHost};
use super::{Backend, NamespaceSpec, Source, SpecError};

/// Blocks of the disks under test.
pub(super) const BLOCKS: u64 = 96;
/// Host memory for the data of one command.
const AREA: usize = 128 << 10;
/// Commands in flight at most.
const AREAS: usize = 24;

/// A command as the generator makes it.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Read {
        start: u64,
        blocks: u64,
        layout: Layout,
        /// The piece that the host wants to be dropped, if there are so many.
        dropped: usize,
    },
    Write {
        start: u64,
        blocks: u64,
        layout: Layout,
        durable: bool,
        byte: u8,
    },
    /// With the host's data as it should be, or with a byte of it changed.
    Compare {
        start: u64,
        blocks: u64,
        layout: Layout,
        changed: Option<usize>,
    },
    Verify {
        start: u64,
        blocks: u64,
    },
    Flush,
    WriteZeroes {
        start: u64,
        blocks: u64,
        deallocate: bool,
        durable: bool,
    },
    Deallocate {
        ranges: Vec<(u64, u64)>,
    },
    /// All becomes zeroes; the LBA size that the disk has already.
    Format,
    /// Waits for all before.
    Drain,
}

/// How data lies in host memory: the distance of its beginning from a page's, and the lengths of the pieces, of
/// which every second is followed by a gap.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    skew: usize,
    pieces: Vec<usize>,
}

impl Layout {
    fn segments(&self, area: usize, mut length: usize) -> Vec<Segment> {
        let mut at = BASE + (area * AREA + self.skew) as u64;
        let mut segments = Vec::new();
        for (index, piece) in self.pieces.iter().copied().chain(std::iter::repeat(usize::MAX)).enumerate() {
            let some = piece.min(length);
            segments.push(Segment { iova: Some(Iova(at)), length: some });
            at += some as u64 + if index % 2 == 1 { 4096 } else { 0 };
            length -= some;
            if length == 0 {
                return segments;
            }
        }
        unreachable!()
    }
}

fn layout() -> impl Strategy<Value = Layout> {
    let skew = prop_oneof![4 => Just(0usize), 2 => Just(512), 1 => Just(4), 1 => 0usize..4096];
    let piece = prop_oneof![3 => Just(4096usize), 2 => Just(512), 1 => 1usize..6000];
    (skew, prop::collection::vec(piece, 0..4)).prop_map(|(skew, pieces)| Layout { skew, pieces })
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    (0..BLOCKS).prop_flat_map(|start| (Just(start), 1..=(BLOCKS - start).min(16)))
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (range(), layout(), 0usize..12)
            .prop_map(|((start, blocks), layout, dropped)| Step::Read { start, blocks, layout, dropped }),
        4 => (range(), layout(), any::<bool>(), 1u8..)
            .prop_map(|((start, blocks), layout, durable, byte)| Step::Write { start, blocks, layout, durable, byte }),
        2 => (range(), layout(), prop::option::of(any::<usize>()))
            .prop_map(|((start, blocks), layout, changed)| Step::Compare { start, blocks, layout, changed }),
        1 => range().prop_map(|(start, blocks)| Step::Verify { start, blocks }),
        1 => Just(Step::Flush),
        1 => (range(), any::<bool>(), any::<bool>()).prop_map(|((start, blocks), deallocate, durable)| {
            Step::WriteZeroes { start, blocks, deallocate, durable }
        }),
        1 => prop::collection::vec(range(), 0..5).prop_map(|ranges| Step::Deallocate { ranges }),
        1 => Just(Step::Format),
        1 => Just(Step::Drain),
    ]
}

fn lbas((start, blocks): (u64, u64)) -> LbaRange {
    LbaRange { start: Lba(start), blocks }
}

/// What the test expects of a command in flight.
struct Expectation {
    ranges: Vec<(u64, u64)>,
    read: Option<(Vec<Segment>, Vec<u8>)>,
    result: Result<(), DiskError>,
}

/// Runs the steps on a disk that holds zeroes, several commands in flight as long as they do not overlap.
pub(super) fn check(mut disk: Backend<TestHost>, steps: &[Step]) {
    // The data of some commands has to be copied.
    let odd = BASE + (AREA * 3) as u64..BASE + (AREA * 7) as u64;
    let mut host = TestHost::new(AREA * AREAS).unpinnable(odd);
    let geometry = disk.geometry();
    assert_eq!(geometry.blocks, BLOCKS);
    let block = 1usize << geometry.block_shift;
    let mut model = vec![0u8; BLOCKS as usize * block];
    let bytes = |start: u64, blocks: u64| start as usize * block..(start + blocks) as usize * block;

    let mut in_flight: Vec<Option<Expectation>> = Vec::new();
    for step in steps.iter().chain([&Step::Drain]) {
        let ranges = match step {
            Step::Read { start, blocks, .. }
            | Step::Write { start, blocks, .. }
            | Step::Compare { start, blocks, .. }
            | Step::Verify { start, blocks }
            | Step::WriteZeroes { start, blocks, .. } => vec![(*start, *blocks)],
            Step::Deallocate { ranges } => ranges.clone(),
            Step::Format => vec![(0, BLOCKS)],
            Step::Flush | Step::Drain => Vec::new(),
        };
        let overlaps = |other: &Expectation| {
            ranges.iter().any(|a| other.ranges.iter().any(|b| a.0 < b.0 + b.1 && b.0 < a.0 + a.1))
        };
        let drain = matches!(step, Step::Drain)
            || in_flight.len() == AREAS
            || in_flight.iter().flatten().any(overlaps);
        if drain {
            let mut done = Vec::new();
            disk.drain(&mut host, &mut done);
            for (tag, result) in done {
                let expected = in_flight[tag.0 as usize].take().expect("reported once");
                assert_eq!(result, expected.result);
                if let Some((segments, bytes)) = expected.read {
                    assert!(host.bytes(&segments) == bytes, "{step:?}");
                }
            }
            assert!(in_flight.iter().all(Option::is_none));
            assert_eq!(host.pins(), 0);
            in_flight.clear();
        }
        let area = in_flight.len();
        let tag = Tag(area as u32);
        let mut read = None;
        let mut expected = Ok(());
        let submission = match step {
            Step::Drain => continue,
            Step::Read { start, blocks, layout, dropped } => {
                let range = bytes(*start, *blocks);
                let mut data = layout.segments(area, range.len());
                host.fill(&data, &vec![0xee; range.len()]);
                let mut wanted = model[range].to_vec();
                let at = data.iter().take(*dropped).map(|segment| segment.length).sum::<usize>();
                if let Some(segment) = data.get_mut(*dropped) {
                    wanted[at..at + segment.length].fill(0);
                    segment.iova = None;
                }
                read = Some((data.clone(), wanted));
                disk.submit(&mut host, tag, Operation::Read { range: lbas((*start, *blocks)), data: &data })
            }
            Step::Write { start, blocks, layout, durable, byte } => {
                let range = bytes(*start, *blocks);
                let data = layout.segments(area, range.len());
                let new: Vec<u8> = (0..range.len()).map(|i| byte.wrapping_add((i / 100) as u8)).collect();
                host.fill(&data, &new);
                model[range].copy_from_slice(&new);
                let range = lbas((*start, *blocks));
                disk.submit(&mut host, tag, Operation::Write { range, data: &data, durable: *durable })
            }
            Step::Compare { start, blocks, layout, changed } => {
                let range = bytes(*start, *blocks);
                let data = layout.segments(area, range.len());
                let mut theirs = model[range].to_vec();
                if let Some(at) = changed {
                    let at = at % theirs.len();
                    theirs[at] ^= 1;
                    expected = Err(DiskError::Mismatch);
                }
                host.fill(&data, &theirs);
                let range = lbas((*start, *blocks));
                disk.submit(&mut host, tag, Operation::Compare { range, data: &data })
            }
            Step::Format => {
                model.fill(0);
                disk.submit(&mut host, tag, Operation::Format { block_shift: geometry.block_shift })
            }
            Step::Verify { start, blocks } => {
                disk.submit(&mut host, tag, Operation::Verify { range: lbas((*start, *blocks)) })
            }
            Step::Flush => disk.submit(&mut host, tag, Operation::Flush),
            Step::WriteZeroes { start, blocks, deallocate, durable } => {
                model[bytes(*start, *blocks)].fill(0);
                let (deallocate, durable) = (*deallocate, *durable);
                let range = lbas((*start, *blocks));
                disk.submit(&mut host, tag, Operation::WriteZeroes { range, deallocate, durable })
            }
            Step::Deallocate { ranges } => {
                if geometry.deallocates {
                    for (start, blocks) in ranges {
                        model[bytes(*start, *blocks)].fill(0);
                    }
                }
                let ranges: Vec<LbaRange> = ranges.iter().copied().map(lbas).collect();
                disk.submit(&mut host, tag, Operation::Deallocate { ranges: &ranges })
            }
        };
        match submission {
            Submission::Done(result) => {
                assert_eq!(result, expected);
                if let Some((segments, bytes)) = read {
                    assert!(host.bytes(&segments) == bytes, "{step:?}");
                }
            }
            Submission::Pending => in_flight.push(Some(Expectation { ranges, read, result: expected })),
        }
    }
}

/// An image of zeroes in `folder`.
pub(super) fn image(folder: &Path, size: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(folder).unwrap();
    file.as_file().set_len(size).unwrap();
    file
}

/// A folder on a disk's file system (direct I/O), and one in memory (no FALLOC_FL_ZERO_RANGE).
pub(super) fn folders() -> [std::path::PathBuf; 2] {
    // Cargo's own scratch folder lies in the build tree, which is on a disk more often than /tmp.
    let on_disk = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    [on_disk, "/dev/shm".into()]
}

fn spec(text: &str) -> NamespaceSpec {
    NamespaceSpec::from_str(text).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_ram_disk_keeps_what_is_written(steps in prop::collection::vec(step(), 1..60), big in any::<bool>()) {
        let block = if big { 4096 } else { 512 };
        let text = format!("ram:{},block-size={block}", BLOCKS * block);
        check(spec(&text).open().unwrap(), &steps);
    }
}

/// What a disk of each kind is made of: 1 MiB of ones with blocks of 512 bytes.
fn kinds(image: &Path) -> [String; 4] {
    let file = |engine| format!("file:{},engine={engine}", image.display());
    ["null:1M".into(), "ram:1M".into(), file("io_uring"), file("threads")]
}

#[test]
fn a_format_changes_the_block_and_leaves_nothing_behind() {
    let image = image(&folders()[0], 1 << 20);
    for text in kinds(image.path()) {
        let mut disk: Backend<TestHost> = spec(&text).open().unwrap();
        let mut host = TestHost::new(1 << 20);
        let data = [Segment { iova: Some(Iova(BASE)), length: 1 << 20 }];
        host.fill(&data, &vec![1; 1 << 20]);
        let write = Operation::Write { range: lbas((0, 2048)), data: &data, durable: false };
        disk.perform(&mut host, write).unwrap();
        let shape = |disk: &Backend<TestHost>| (disk.geometry().block_shift, disk.geometry().blocks);
        assert_eq!((shape(&disk), disk.geometry().formats), ((9, 2048), &[9, 12][..]));
        assert_eq!(disk.perform(&mut host, Operation::Format { block_shift: 12 }), Ok(()));
        assert_eq!(shape(&disk), (12, 256));
        if !text.starts_with("null") {
            disk.perform(&mut host, Operation::Read { range: lbas((0, 256)), data: &data }).unwrap();
            assert!(host.bytes(&data).iter().all(|byte| *byte == 0), "{text}");
        }
        // The last block in the new size, and back.
        let page = [Segment { iova: Some(Iova(BASE)), length: 4096 }];
        host.fill(&page, &[2; 4096]);
        let write = Operation::Write { range: lbas((255, 1)), data: &page, durable: true };
        assert_eq!(disk.perform(&mut host, write), Ok(()));
        assert_eq!(disk.perform(&mut host, Operation::Format { block_shift: 9 }), Ok(()));
        assert_eq!(shape(&disk), (9, 2048));
        drop(disk);
    }
    assert!(std::fs::read(image.path()).unwrap().iter().all(|byte| *byte == 0));
    // A size that no blocks of 4096 bytes fill has one format.
    let disk: Backend<TestHost> = spec("ram:1536").open().unwrap();
    assert_eq!(disk.geometry().formats, [9]);
}

#[test]
fn a_null_disk_completes_and_touches_nothing() {
    let mut disk = spec("null:1G,block-size=4096").open().unwrap();
    let mut host = TestHost::new(4096);
    let data = [Segment { iova: Some(Iova(BASE)), length: 4096 }];
    host.fill(&data, &[7; 4096]);
    assert_eq!(disk.geometry().blocks, 262_144);
    assert_eq!(disk.perform(&mut host, Operation::Read { range: lbas((5, 1)), data: &data }), Ok(()));
    assert_eq!(host.bytes(&data), [7; 4096]);
}

#[test]
fn host_memory_that_cannot_be_reached_is_a_data_transfer_error() {
    let image = image(&folders()[0], 1 << 20);
    for text in ["ram:1M".into(), format!("file:{}", image.path().display())] {
        let mut disk = spec(&text).open().unwrap();
        let mut host = TestHost::new(4096);
        let data = [Segment { iova: Some(Iova(BASE + 8192)), length: 4096 }];
        let read = Operation::Read { range: lbas((0, 8)), data: &data };
        assert_eq!(disk.perform(&mut host, read), Err(DiskError::DataTransfer));
        let write = Operation::Write { range: lbas((0, 8)), data: &data, durable: false };
        assert_eq!(disk.perform(&mut host, write), Err(DiskError::DataTransfer));
    }
}

#[test]
fn namespaces_are_parsed() {
    let plain = |source| NamespaceSpec { source, block_shift: 9, read_only: false };
    assert_eq!(spec("null:8K"), plain(Source::Null { size: 8192 }));
    assert_eq!(spec("ram:3MiB"), plain(Source::Ram { size: 3 << 20 }));
    assert_eq!(spec("ram:2t"), plain(Source::Ram { size: 2 << 40 }));
    assert_eq!(spec("file:a,,b:c"), plain(Source::File { path: "a,b:c".into(), engine: None }));
    let all = spec("file:x=y,read-only,block-size=4096,engine=threads");
    assert_eq!((all.block_shift, all.read_only), (12, true));
    assert_eq!(all.to_string().parse(), Ok(all));
}

#[test]
fn mistakes_in_namespaces_have_one_clear_line() {
    for (text, line) in [
        ("disk.img", "Unknown namespace 'disk.img': write file:PATH, ram:SIZE or null:SIZE"),
        ("disk:1", "Unknown namespace 'disk:1': write file:PATH, ram:SIZE or null:SIZE"),
        ("file:", "No path after 'file:': write file:PATH"),
        ("ram:", "'' is not a size: write a number of bytes, or one with K, M, G or T, as in 512M"),
        ("ram:1.5G", "'1.5G' is not a size: write a number of bytes, or one with K, M, G or T, as in 512M"),
        ("ram:-1", "'-1' is not a size: write a number of bytes, or one with K, M, G or T, as in 512M"),
        ("ram:0", "A namespace cannot have size 0: write a size such as 512M"),
        ("ram:9999999T", "Size '9999999T' is too big: at most 8191P can be addressed"),
        ("null:1000", "Size 1000 is not a multiple of the block of 512 bytes: write 1024"),
        ("null:1K,block-size=4096", "Size 1024 is not a multiple of the block of 4096 bytes: write 4096"),
        (
            "file:x,blocksize=1",
            "Unknown key 'blocksize': keys are block-size, read-only and engine (a comma in a path is written twice)",
        ),
        (
            "file:x,block-size=1024",
            "'block-size=1024' is not possible: write block-size=512 or block-size=4096",
        ),
        ("file:x,read-only=1", "'read-only=1' is not possible: write read-only=on or read-only=off"),
        ("file:x,read-only,read-only", "'read-only' is given twice: write it once"),
        ("file:x,engine=aio", "'engine=aio' is not possible: write engine=io_uring or engine=threads"),
        ("ram:1M,engine=threads", "'engine' is for files: leave it out"),
    ] {
        let error: SpecError = NamespaceSpec::from_str(text).unwrap_err();
        assert_eq!(error.to_string(), line);
    }
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "(file|ram|null)?:?[0-9a-zA-Z=,-]{0,20}") {
        if let Ok(spec) = NamespaceSpec::from_str(&text) {
            prop_assert_eq!(spec.to_string().parse(), Ok(spec));
        }
    }
}
