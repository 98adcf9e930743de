#![expect(unsafe_code, reason = "pins memory of the tests' own")]

use std::cell::UnsafeCell;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use outboard_nvme::Lba;
use outboard_nvme::controller::{DiskError as Failure, DmaError, LbaRange, Segment};
use proptest::prelude::*;

use super::*;

const MEMORY: usize = 1 << 20;
/// From here on memory cannot be pinned, as if it were reached by messages.
const UNPINNABLE: usize = 768 << 10;

#[repr(C, align(4096))]
struct Bytes(UnsafeCell<[u8; MEMORY]>);

/// A host with memory of its own, which must outlive its pins.
pub(super) struct TestHost(Box<Bytes>);

pub(super) struct TestPin {
    start: *mut u8,
    length: usize,
}

impl PinnedBytes for TestPin {
    fn bytes(&self) -> Option<VolatileSlice<'_>> {
        // SAFETY: inside of the host's memory, which the tests keep until the disk is gone.
        Some(unsafe { VolatileSlice::new(self.start, self.length) })
    }
}

impl TestHost {
    pub(super) fn new() -> Self {
        // Zeroed on the heap: a megabyte does not go through the stack.
        let layout = std::alloc::Layout::new::<Bytes>();
        // SAFETY: zeroes are valid bytes, and the layout is the type's.
        Self(unsafe { Box::from_raw(std::alloc::alloc_zeroed(layout).cast()) })
    }

    fn bytes(&mut self, at: Iova, length: usize) -> Result<&mut [u8], DmaError> {
        let end = at.0 as usize + length;
        self.0.0.get_mut().get_mut(at.0 as usize..end).ok_or(DmaError { iova: at, length })
    }

    fn fill(&mut self, segments: &[Segment], data: &[u8]) {
        let mut done = 0;
        for segment in segments {
            let bytes = self.bytes(segment.iova, segment.length).unwrap();
            bytes.copy_from_slice(&data[done..done + segment.length]);
            done += segment.length;
        }
    }

    fn gather(&mut self, segments: &[Segment]) -> Vec<u8> {
        segments.iter().flat_map(|s| self.bytes(s.iova, s.length).unwrap().to_vec()).collect()
    }
}

impl Host for TestHost {
    fn read(&mut self, at: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        into.copy_from_slice(self.bytes(at, into.len())?);
        Ok(())
    }

    fn write(&mut self, at: Iova, from: &[u8]) -> Result<(), DmaError> {
        self.bytes(at, from.len())?.copy_from_slice(from);
        Ok(())
    }

    fn load(&mut self, _at: Iova) -> Result<u32, DmaError> {
        unreachable!("disks move data only")
    }

    fn store(&mut self, _at: Iova, _value: u32) -> Result<(), DmaError> {
        unreachable!("disks move data only")
    }

    fn publish(&mut self, _at: Iova, _entry: [u32; 4]) -> Result<(), DmaError> {
        unreachable!("disks move data only")
    }

    fn doorbell(&mut self, _index: usize) -> u32 {
        unreachable!("disks move data only")
    }

    fn set_doorbell(&mut self, _index: usize, _value: u32) {}

    fn interrupt(&mut self, _vector: u16) {}

    fn interrupt_line(&mut self, _asserted: bool) {}
}

impl PinHost for TestHost {
    type Pin = TestPin;

    fn pin(&mut self, at: Iova, length: usize, _direction: Direction) -> Option<TestPin> {
        if at.0 as usize + length > UNPINNABLE {
            return None;
        }
        Some(TestPin { start: self.bytes(at, length).ok()?.as_mut_ptr(), length })
    }
}

/// Runs one operation to its end.
fn run(disk: &mut Backend<TestHost>, host: &mut TestHost, operation: Operation<'_>) -> Result<(), Failure> {
    let tag = Tag(7);
    if let Submission::Done(result) = disk.submit(host, tag, operation) {
        return result;
    }
    disk.commit(host);
    wait(disk, host, 1)
        .pop()
        .map(|(reported, result)| {
            assert_eq!(reported, tag);
            result
        })
        .unwrap()
}

fn wait(disk: &mut Backend<TestHost>, host: &mut TestHost, count: usize) -> Vec<(Tag, Result<(), Failure>)> {
    let mut done = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(20);
    while done.len() < count {
        disk.reap(host, &mut done);
        if done.len() < count {
            assert!(Instant::now() < deadline, "{} of {count} operations ended", done.len());
            let event = disk.event().unwrap();
            let mut descriptors = [PollFd::new(event, PollFlags::POLLIN)];
            poll(&mut descriptors, PollTimeout::from(100_u8)).unwrap();
        }
    }
    done
}

fn range(start: u64, blocks: u64) -> LbaRange {
    LbaRange { start: Lba(start), blocks }
}

fn image(directory: &Path, size: u64) -> String {
    let path = directory.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    path.to_str().unwrap().to_string()
}

fn open(spec: &str) -> Backend<TestHost> {
    spec.parse::<NamespaceSpec>().unwrap().open().unwrap()
}

/// `/tmp` may be a tmpfs; the checkout is on a disk, where O_DIRECT works.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    Read { start: u64, blocks: u64, shape: Shape },
    Write { start: u64, blocks: u64, shape: Shape, byte: u8, durable: bool },
    Flush,
    Zero { start: u64, blocks: u64, deallocate: bool, durable: bool },
    Deallocate(Vec<(u64, u64)>),
}

/// Where a command's data lies.
#[derive(Clone, Copy, Debug)]
enum Shape {
    Pages,
    /// Begins inside of a page, as a PRP offset does.
    Offset(usize),
    /// Cannot be pinned.
    ByMessages,
    /// One half can be pinned and the other cannot.
    Mixed,
}

const BLOCKS: u64 = 256;

fn extent() -> impl Strategy<Value = (u64, u64)> {
    (0..BLOCKS).prop_flat_map(|start| (Just(start), 1..=(BLOCKS - start).min(32)))
}

fn step() -> impl Strategy<Value = Step> {
    let shape = prop_oneof![
        Just(Shape::Pages),
        (1_usize..1024).prop_map(|at| Shape::Offset(at * 4)),
        Just(Shape::ByMessages),
        Just(Shape::Mixed)
    ];
    prop_oneof![
        3 => (extent(), shape.clone()).prop_map(|((start, blocks), shape)| Step::Read { start, blocks, shape }),
        4 => (extent(), shape, any::<u8>(), any::<bool>()).prop_map(|((start, blocks), shape, byte, durable)| {
            Step::Write { start, blocks, shape, byte, durable }
        }),
        1 => Just(Step::Flush),
        2 => (extent(), any::<bool>(), any::<bool>()).prop_map(|((start, blocks), deallocate, durable)| {
            Step::Zero { start, blocks, deallocate, durable }
        }),
        1 => prop::collection::vec(extent(), 0..4).prop_map(Step::Deallocate),
    ]
}

/// The segments of a transfer of `length` bytes.
fn segments(shape: Shape, length: usize) -> Vec<Segment> {
    let at = |iova: usize, length: usize| Segment { iova: Iova(iova as u64), length };
    match shape {
        Shape::Pages => vec![at(0x10000, length)],
        Shape::Offset(offset) => {
            let first = (4096 - offset).min(length);
            let mut segments = vec![at(0x20000 + offset, first)];
            if length > first {
                segments.push(at(0x40000, length - first));
            }
            segments
        }
        Shape::ByMessages => vec![at(UNPINNABLE + 0x1000, length)],
        Shape::Mixed => vec![at(0x10000, length / 2), at(UNPINNABLE, length - length / 2)],
    }
}

fn pattern(byte: u8, length: usize) -> Vec<u8> {
    (0..length).map(|i| byte.wrapping_add((i / 64) as u8)).collect()
}

/// Runs steps against a disk and an array of bytes.
fn against_a_model(spec: &str, steps: &[Step]) {
    let mut host = TestHost::new();
    let mut disk = open(spec);
    let block = 1_usize << disk.geometry().block_shift;
    let mut model = vec![0_u8; BLOCKS as usize * block];
    let place = |start: u64, blocks: u64| start as usize * block..(start + blocks) as usize * block;
    for step in steps {
        match step {
            &Step::Read { start, blocks, shape } => {
                let data = segments(shape, blocks as usize * block);
                host.fill(&data, &vec![0xa5; blocks as usize * block]);
                run(&mut disk, &mut host, Operation::Read { range: range(start, blocks), data: &data })
                    .unwrap();
                assert_eq!(host.gather(&data), model[place(start, blocks)], "{step:?}");
            }
            &Step::Write { start, blocks, shape, byte, durable } => {
                let data = segments(shape, blocks as usize * block);
                let content = pattern(byte, blocks as usize * block);
                host.fill(&data, &content);
                let operation = Operation::Write { range: range(start, blocks), data: &data, durable };
                run(&mut disk, &mut host, operation).unwrap();
                model[place(start, blocks)].copy_from_slice(&content);
            }
            Step::Flush => run(&mut disk, &mut host, Operation::Flush).unwrap(),
            &Step::Zero { start, blocks, deallocate, durable } => {
                let range = range(start, blocks);
                run(&mut disk, &mut host, Operation::WriteZeroes { range, deallocate, durable }).unwrap();
                model[place(start, blocks)].fill(0);
            }
            Step::Deallocate(ranges) => {
                let ranges: Vec<_> = ranges.iter().map(|&(start, blocks)| range(start, blocks)).collect();
                run(&mut disk, &mut host, Operation::Deallocate { ranges: &ranges }).unwrap();
                for range in ranges {
                    model[place(range.start.0, range.blocks)].fill(0);
                }
            }
        }
    }
    let whole = segments(Shape::Pages, 64 << 10);
    for at in (0..model.len()).step_by(64 << 10) {
        let range = range((at / block) as u64, ((64 << 10) / block) as u64);
        run(&mut disk, &mut host, Operation::Read { range, data: &whole }).unwrap();
        assert_eq!(host.gather(&whole), model[at..at + (64 << 10)]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn memory_is_an_array_of_bytes(steps in prop::collection::vec(step(), 0..30)) {
        against_a_model("ram:128K", &steps);
        against_a_model("ram:1M,block-size=4096", &steps);
    }

    #[test]
    fn a_file_is_an_array_of_bytes(
        steps in prop::collection::vec(step(), 0..20),
        block in prop::sample::select(vec![512_u64, 4096]),
        engine in prop::sample::select(vec!["io_uring", "threads"]),
        buffered in any::<bool>(),
    ) {
        // A tmpfs has no O_DIRECT, and cannot zero ranges.
        let directory = if buffered { tempfile::tempdir_in("/dev/shm").unwrap() } else { directory() };
        let path = image(directory.path(), BLOCKS * block);
        against_a_model(&format!("file:{path},block-size={block},engine={engine}"), &steps);
    }
}

#[test]
fn o_direct_is_used_where_it_works() {
    let directory = directory();
    let path = image(directory.path(), 1 << 20);
    let disk = open(&format!("file:{path},block-size=4096"));
    let Backend::File(file) = &disk else { unreachable!() };
    assert!(file.is_direct(), "the file system of {path} allows no O_DIRECT: these tests prove little here");
}

#[test]
fn many_operations_at_once_each_end_once() {
    for engine in ["io_uring", "threads"] {
        let directory = directory();
        let path = image(directory.path(), 4 << 20);
        let mut disk = open(&format!("file:{path},block-size=4096,engine={engine}"));
        let mut host = TestHost::new();
        // More than an engine takes at once.
        for tag in 0..1000_u32 {
            let data = [Segment { iova: Iova(u64::from(tag % 128) * 4096), length: 4096 }];
            let operation = Operation::Read { range: range(u64::from(tag) % 1024, 1), data: &data };
            assert_eq!(disk.submit(&mut host, Tag(tag), operation), Submission::Pending);
        }
        disk.commit(&mut host);
        let mut tags: Vec<_> = wait(&mut disk, &mut host, 1000)
            .into_iter()
            .map(|(tag, result)| {
                assert_eq!(result, Ok(()));
                tag.0
            })
            .collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..1000).collect::<Vec<_>>());
    }
}

#[test]
fn sparse_files_stay_sparse_and_become_so_again() {
    let directory = directory();
    let path = image(directory.path(), 16 << 20);
    let blocks = || std::fs::metadata(&path).unwrap().blocks();
    let mut disk = open(&format!("file:{path}"));
    let mut host = TestHost::new();
    let data = segments(Shape::Pages, 64 << 10);
    run(&mut disk, &mut host, Operation::Read { range: range(0, 128), data: &data }).unwrap();
    assert_eq!(blocks(), 0, "reading allocates nothing");
    run(&mut disk, &mut host, Operation::Write { range: range(128, 128), data: &data, durable: true })
        .unwrap();
    assert!((128..1024).contains(&blocks()), "{}", blocks());
    run(&mut disk, &mut host, Operation::Deallocate { ranges: &[range(128, 128)] }).unwrap();
    assert_eq!(blocks(), 0);
    run(&mut disk, &mut host, Operation::Write { range: range(0, 128), data: &data, durable: true }).unwrap();
    let operation = Operation::WriteZeroes { range: range(0, 128), deallocate: true, durable: true };
    run(&mut disk, &mut host, operation).unwrap();
    assert_eq!(blocks(), 0);
}

#[test]
fn an_image_that_shrinks_and_memory_that_is_not_there_are_errors() {
    let directory = directory();
    let path = image(directory.path(), 1 << 20);
    let mut disk = open(&format!("file:{path}"));
    let mut host = TestHost::new();
    let nowhere = [Segment { iova: Iova(MEMORY as u64), length: 512 }];
    let read = Operation::Read { range: range(0, 1), data: &nowhere };
    assert_eq!(run(&mut disk, &mut host, read), Err(Failure::DataTransfer));
    let write = Operation::Write { range: range(0, 1), data: &nowhere, durable: false };
    assert_eq!(run(&mut disk, &mut host, write), Err(Failure::DataTransfer));
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let data = segments(Shape::Pages, 4096);
    let read = Operation::Read { range: range(64, 8), data: &data };
    assert_eq!(run(&mut disk, &mut host, read), Err(Failure::Read));
}

#[test]
fn an_image_has_one_writer_or_many_readers() {
    let directory = directory();
    let path = image(directory.path(), 1 << 20);
    let try_open =
        |options: &str| format!("file:{path}{options}").parse::<NamespaceSpec>().unwrap().open::<TestHost>();
    let writer = try_open("").unwrap();
    assert!(matches!(try_open(""), Err(DiskError::Locked { .. })));
    assert!(matches!(try_open(",read-only"), Err(DiskError::Locked { .. })));
    drop(writer);
    let _readers = [try_open(",read-only").unwrap(), try_open(",read-only").unwrap()];
    assert!(matches!(try_open(""), Err(DiskError::Locked { .. })));
}

#[test]
fn what_a_user_gets_wrong_has_its_own_error() {
    let directory = directory();
    let path = image(directory.path(), 5000);
    let directory = directory.path().to_str().unwrap().to_string();
    let error = |spec: &str| spec.parse::<NamespaceSpec>().unwrap().open::<TestHost>().err().unwrap();
    assert!(matches!(error(&format!("file:{directory}/nothing")), DiskError::Missing { .. }));
    assert!(matches!(error(&format!("file:{directory}")), DiskError::Kind { .. }));
    assert!(matches!(error("file:/dev/null"), DiskError::Kind { .. }));
    assert!(matches!(error(&format!("file:{path}")), DiskError::Fraction { size: 5000, block: 512, .. }));
}
