//! Images on real file systems.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use outboard_nvme::controller::{Disk, DiskError, LbaRange, Operation, Segment, Submission, Tag};
use outboard_nvme::{Iova, Lba};
use proptest::prelude::*;

use super::buffers::Alignment;
use super::image::{Caching, OpenError, Opened};
use super::{EngineKind, FileDisk, Threads, Uring};
use crate::disk::test_host::{BASE, TestHost};
use crate::disk::tests::{BLOCKS, check, folders, image, step};
use crate::disk::{Backend, NamespaceSpec, Storage};

const BOTH: [EngineKind; 2] = [EngineKind::IoUring, EngineKind::Threads];

fn open(path: &Path, block_shift: u32, caching: Caching, engine: EngineKind) -> Backend<TestHost> {
    let Opened { image, geometry, traits } = Opened::new(path, block_shift, false, caching).unwrap();
    Backend(match engine {
        EngineKind::IoUring => Storage::Uring(FileDisk::new(geometry, traits, Uring::new(&image).unwrap())),
        EngineKind::Threads => {
            Storage::Threads(FileDisk::new(geometry, traits, Threads::new(&image).unwrap()))
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_file_keeps_what_is_written(
        steps in prop::collection::vec(step(), 1..60),
        block_shift in prop_oneof![Just(9u32), Just(12)],
        folder in 0usize..2,
        caching in prop_oneof![Just(Caching::Direct), Just(Caching::Buffered)],
        engine in prop_oneof![Just(EngineKind::IoUring), Just(EngineKind::Threads)],
    ) {
        let image = image(&folders()[folder], BLOCKS << block_shift);
        check(open(image.path(), block_shift, caching, engine), &steps);
    }
}

fn open_error(path: &Path, block_shift: u32, read_only: bool) -> OpenError {
    match Opened::new(path, block_shift, read_only, Caching::Direct) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error,
    }
}

fn lbas(start: u64, blocks: u64) -> LbaRange {
    LbaRange { start: Lba(start), blocks }
}

fn data(length: usize) -> [Segment; 1] {
    [Segment { iova: Some(Iova(BASE)), length }]
}

#[test]
fn direct_io_is_used_where_the_file_allows_it() {
    let image = image(&folders()[0], 1 << 20);
    let direct = Opened::new(image.path(), 12, false, Caching::Direct).unwrap();
    assert!(matches!(direct.traits.alignment, Alignment::Direct { .. }), "{:?}", direct.traits);
    drop(direct);
    let buffered = Opened::new(image.path(), 9, false, Caching::Buffered).unwrap();
    assert_eq!(buffered.traits.alignment, Alignment::Any);
}

#[test]
fn aligned_data_is_not_copied() {
    let image = image(&folders()[0], 1 << 20);
    for engine in BOTH {
        let mut disk = open(image.path(), 9, Caching::Direct, engine);
        let mut host = TestHost::new(8192);
        // Pinned while it is in flight, until it is reaped.
        let (range, data) = (lbas(8, 8), data(4096));
        let operation = Operation::Read { range, data: &data };
        assert_eq!(disk.submit(&mut host, Tag(1), operation), Submission::Pending);
        assert_eq!(host.pins(), 1);
        let mut done = Vec::new();
        disk.drain(&mut host, &mut done);
        assert_eq!((done, host.pins()), (vec![(Tag(1), Ok(()))], 0));
        // An odd address has to be.
        let odd = [Segment { iova: Some(Iova(BASE + 2)), length: 4096 }];
        disk.submit(&mut host, Tag(1), Operation::Read { range, data: &odd });
        assert_eq!(host.pins(), 0);
    }
}

#[test]
fn more_commands_than_the_engine_takes_are_all_performed() {
    const COMMANDS: u32 = 3000;
    for engine in BOTH {
        for caching in [Caching::Direct, Caching::Buffered] {
            let image = image(&folders()[0], u64::from(COMMANDS) * 512);
            let mut disk = open(image.path(), 9, caching, engine);
            let mut host = TestHost::new(COMMANDS as usize * 512);
            let segment =
                |index: u32| [Segment { iova: Some(Iova(BASE + u64::from(index) * 512)), length: 512 }];
            for index in 0..COMMANDS {
                host.fill(&segment(index), &index.to_le_bytes().repeat(128));
                let range = lbas(u64::from(index), 1);
                let operation = Operation::Write { range, data: &segment(index), durable: false };
                assert_eq!(disk.submit(&mut host, Tag(index), operation), Submission::Pending);
            }
            assert_eq!(disk.in_flight(), COMMANDS as usize);
            let mut done = Vec::new();
            disk.drain(&mut host, &mut done);
            done.sort_by_key(|(tag, _)| tag.0);
            assert!(done.iter().copied().eq((0..COMMANDS).map(|index| (Tag(index), Ok(())))));
            let written = std::fs::read(image.path()).unwrap();
            for (block, index) in written.chunks(4).zip((0..COMMANDS).flat_map(|index| [index; 128])) {
                assert_eq!(block, index.to_le_bytes());
            }
        }
    }
}

#[test]
fn a_disk_that_is_dropped_finishes_what_is_in_flight() {
    for engine in BOTH {
        let image = image(&folders()[0], 4 << 20);
        let mut host = TestHost::new(1 << 20);
        let all = data(1 << 20);
        host.fill(&all, &vec![0x5a; 1 << 20]);
        let mut disk = open(image.path(), 12, Caching::Direct, engine);
        for index in 0..4 {
            let range = lbas(index * 256, 256);
            disk.submit(&mut host, Tag(0), Operation::Write { range, data: &all, durable: true });
        }
        disk.commit(&mut host);
        assert_eq!(host.pins(), 4);
        drop(disk);
        assert_eq!(host.pins(), 0);
        assert!(std::fs::read(image.path()).unwrap().iter().all(|&byte| byte == 0x5a));
        // And the image is free at once.
        open(image.path(), 12, Caching::Direct, engine);
    }
}

#[test]
fn sparse_images_stay_sparse() {
    for folder in folders() {
        for engine in BOTH {
            let image = image(&folder, 64 << 20);
            let space = || image.as_file().metadata().unwrap().blocks() * 512;
            let mut disk = open(image.path(), 9, Caching::Direct, engine);
            assert!(disk.geometry().deallocates);
            let mut host = TestHost::new(1 << 20);
            let all = data(1 << 20);
            host.fill(&all, &vec![1; 1 << 20]);
            disk.perform(&mut host, Operation::Read { range: lbas(0, 2048), data: &all }).unwrap();
            assert_eq!(space(), 0);
            let zeroes = Operation::WriteZeroes { range: lbas(0, 65_536), deallocate: true, durable: true };
            disk.perform(&mut host, zeroes).unwrap();
            assert_eq!(space(), 0);
            host.fill(&all, &vec![1; 1 << 20]);
            for index in 0..4 {
                let range = lbas(2048 * index, 2048);
                disk.perform(&mut host, Operation::Write { range, data: &all, durable: false }).unwrap();
            }
            disk.perform(&mut host, Operation::Flush).unwrap();
            assert!((4 << 20..5 << 20).contains(&space()), "{}", space());
            // In quarters of a file system block: joined, they give it back; alone, they are zeroed.
            let quarters: Vec<LbaRange> = (0..256).map(|index| lbas(1 + 2 * index, 2)).collect();
            disk.perform(&mut host, Operation::Deallocate { ranges: &quarters }).unwrap();
            assert!(space() <= (4 << 20) - (504 * 512), "{}", space());
            disk.perform(&mut host, Operation::Read { range: lbas(0, 2048), data: &all }).unwrap();
            let bytes = host.bytes(&all);
            let ones: Vec<usize> =
                (0..2048).filter(|block| bytes[block * 512..][..512] == [1; 512]).collect();
            let zeroes = bytes.iter().filter(|&&byte| byte == 0).count();
            assert_eq!((ones.len(), zeroes), (1536, 512 * 512));
            disk.perform(&mut host, Operation::Deallocate { ranges: &[lbas(0, 131_072)] }).unwrap();
            assert_eq!(space(), 0);
            assert_eq!(image.as_file().metadata().unwrap().len(), 64 << 20);
        }
    }
}

#[test]
fn an_image_that_shrinks_or_vanishes_gives_errors() {
    for engine in BOTH {
        for caching in [Caching::Direct, Caching::Buffered] {
            let image = image(&folders()[0], 1 << 20);
            let mut disk = open(image.path(), 9, caching, engine);
            let mut host = TestHost::new(8192);
            let all = data(8192);
            image.as_file().set_len(512 << 10).unwrap();
            let beyond = Operation::Read { range: lbas(1024, 16), data: &all };
            assert_eq!(disk.perform(&mut host, beyond), Err(DiskError::Read));
            let across = Operation::Read { range: lbas(1016, 16), data: &all };
            assert_eq!(disk.perform(&mut host, across), Err(DiskError::Read));
            image.as_file().set_len((512 << 10) - 100).unwrap();
            let inside = Operation::Read { range: lbas(1016, 16), data: &all };
            assert_eq!(disk.perform(&mut host, inside), Err(DiskError::Read));
            image.close().unwrap();
            let before = Operation::Read { range: lbas(0, 16), data: &all };
            assert_eq!(disk.perform(&mut host, before), Ok(()));
        }
    }
}

#[test]
fn a_write_to_an_image_without_permission_is_an_error() {
    let image = image(&folders()[0], 1 << 20);
    let Opened { image, geometry, traits } = Opened::new(image.path(), 9, true, Caching::Direct).unwrap();
    assert!(geometry.read_only && !geometry.volatile_cache && !geometry.deallocates);
    let mut disk = Backend(Storage::Uring(FileDisk::new(geometry, traits, Uring::new(&image).unwrap())));
    let mut host = TestHost::new(4096);
    let write = Operation::Write { range: lbas(0, 8), data: &data(4096), durable: false };
    assert_eq!(disk.perform(&mut host, write), Err(DiskError::Internal));
}

#[test]
fn mistakes_with_images_have_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let line = |path: &Path| open_error(path, 12, false).to_string();
    let missing = path("missing.img");
    let name = missing.display();
    assert_eq!(
        line(&missing),
        format!("No image {name}: create it, for example with `truncate -s 10G {name}`")
    );
    let name = folder.path().display();
    assert_eq!(line(folder.path()), format!("{name} is a directory: name an image file or a block device"));
    assert!(line(Path::new("/dev/null")).contains("is a character device"));
    let fifo = path("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(line(&fifo).contains("is a named pipe"));
    let file = path("image");
    File::create(&file).unwrap();
    let name = file.display();
    assert_eq!(
        line(&file),
        format!("{name} is empty: give it a size, for example with `truncate -s 10G {name}`")
    );
    File::options().write(true).open(&file).unwrap().set_len(5 * 512).unwrap();
    assert_eq!(
        line(&file),
        format!(
            "{name} has 2560 bytes, not a multiple of block-size=4096: \
             lengthen it with `truncate -s 4096 {name}`, or use `block-size=512`"
        )
    );
    File::options().write(true).open(&file).unwrap().set_len(8192).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o444)).unwrap();
    // Root may write all the same.
    if !nix::unistd::geteuid().is_root() {
        assert!(matches!(open_error(&file, 12, false), OpenError::Unwritable { .. }));
    }
    assert!(Opened::new(&file, 12, true, Caching::Direct).is_ok());
}

#[test]
fn an_image_is_written_by_one_and_read_by_many() {
    let image = image(&folders()[0], 1 << 20);
    let open = |read_only| Opened::new(image.path(), 9, read_only, Caching::Direct);
    let is_locked = |read_only| {
        assert!(matches!(open(read_only), Err(OpenError::Locked { .. })), "{read_only}");
    };
    let writer = open(false).unwrap();
    is_locked(false);
    is_locked(true);
    drop(writer);
    let readers = [open(true).unwrap(), open(true).unwrap()];
    is_locked(false);
    drop(readers);
    open(false).unwrap();
}

#[test]
fn threads_stand_in_where_io_uring_is_refused() {
    let image = image(&folders()[0], 1 << 20);
    let spec =
        |more: &str| format!("file:{}{more}", image.path().display()).parse::<NamespaceSpec>().unwrap();
    assert!(matches!(spec("").open::<TestHost>().unwrap().0, Storage::Uring(_)));
    let refused = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                no_io_uring::refuse();
                assert!(matches!(spec("").open::<TestHost>().unwrap().0, Storage::Threads(_)));
                spec(",engine=io_uring").open::<TestHost>().err().unwrap().to_string()
            })
            .join()
            .unwrap()
    });
    let name = image.path().display();
    assert_eq!(
        refused,
        format!(
            "The kernel refuses io_uring for {name} (Operation not permitted (os error 1)): \
             leave `engine` out, or set it to `threads`"
        )
    );
}

mod no_io_uring {
    #![expect(unsafe_code, reason = "seccomp")]

    use nix::libc;

    /// Makes io_uring_setup fail with EPERM in this thread, as container runtimes do.
    pub(super) fn refuse() {
        let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        let mut filter = [
            // The system call's number.
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_io_uring_setup as u32),
            statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the program is whole and lives through the calls, which concern this thread only.
        let result = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
        };
        assert_eq!(result, 0);
    }
}

/// Runs qemu-io on a raw image; whether it succeeded, and what it said.
fn qemu_io(path: &Path, arguments: &[&str]) -> (bool, String) {
    let output = Command::new("qemu-io").args(["-f", "raw"]).args(arguments).arg(path).output();
    let output = output.expect("qemu-io of the package qemu-utils");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn qemu_and_we_keep_out_of_each_others_images() {
    // qemu-utils is on the machines that we are developed on; elsewhere our own lock test stands alone.
    if Command::new("qemu-io").arg("--version").output().is_err() {
        return eprintln!("qemu-io is not installed");
    }
    let image = image(&folders()[0], 1 << 20);
    let path = image.path();
    let ours = Opened::new(path, 9, false, Caching::Direct).unwrap();
    let (success, text) = qemu_io(path, &["-c", "write 0 4096"]);
    assert!(!success && text.contains("Failed to get \"write\" lock"), "{text}");
    // A reader that minds no writer is let through by QEMU, too.
    let (success, text) = qemu_io(path, &["-r", "-c", "read 0 4096"]);
    assert!(success, "{text}");
    let resize = Command::new("qemu-img").args(["resize", "-f", "raw"]).arg(path).arg("2M").output().unwrap();
    let text = String::from_utf8_lossy(&resize.stderr);
    assert!(!resize.status.success() && text.contains("Failed to get"), "{text}");
    drop(ours);

    let reader = Opened::new(path, 9, true, Caching::Direct).unwrap();
    let (success, text) = qemu_io(path, &["-c", "write 0 4096"]);
    assert!(!success && text.contains("Failed to get"), "{text}");
    let (success, text) = qemu_io(path, &["-r", "-c", "read 0 4096"]);
    assert!(success, "{text}");
    drop(reader);
    let (success, text) = qemu_io(path, &["-c", "write -P 7 0 4096"]);
    assert!(success, "{text}");
    let mut first = [0; 4096];
    image.as_file().read_exact_at(&mut first, 0).unwrap();
    assert_eq!(first, [7; 4096]);

    // The other way round.
    let mut qemu = Command::new("qemu-io")
        .args(["-f", "raw"])
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It holds the image when it answers.
    qemu.stdin.as_mut().unwrap().write_all(b"read 0 512\n").unwrap();
    let mut answer = [0; 16];
    qemu.stdout.as_mut().unwrap().read_exact(&mut answer).unwrap();
    let error = open_error(path, 9, false).to_string();
    let (pid, name) = (qemu.id(), path.display());
    assert_eq!(
        error,
        format!(
            "{name} is in use by qemu-io (process {pid}): stop that, or open the image `read-only` in both"
        )
    );
    drop(qemu.stdin.take());
    assert!(qemu.wait().unwrap().success());
    Opened::new(path, 9, false, Caching::Direct).unwrap();
}

/// A loop device on an image, with sectors of its own size.
struct Loop(PathBuf);

impl Loop {
    fn new(image: &Path, sector: u32) -> Loop {
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--sector-size"]).arg(sector.to_string()).arg(image);
        let output = losetup.output().expect("losetup of the package mount");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Loop(String::from_utf8(output.stdout).unwrap().trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    #[ignore = "needs root and loop devices"]
    fn a_block_device_keeps_what_is_written(
        steps in prop::collection::vec(step(), 1..60),
        block_shift in prop_oneof![Just(9u32), Just(12)],
        sector in prop_oneof![Just(512u32), Just(4096)],
        engine in prop_oneof![Just(EngineKind::IoUring), Just(EngineKind::Threads)],
    ) {
        let image = image(&folders()[0], BLOCKS << block_shift);
        let device = Loop::new(image.path(), sector);
        check(open(&device.0, block_shift, Caching::Direct, engine), &steps);
    }
}

/// More than one operation reads.
#[test]
fn a_verify_reads_all_of_a_long_range() {
    for engine in BOTH {
        for caching in [Caching::Direct, Caching::Buffered] {
            let image = image(&folders()[0], 5 << 19);
            let mut disk = open(image.path(), 9, caching, engine);
            let mut host = TestHost::new(4096);
            let verify = |start, blocks| Operation::Verify { range: lbas(start, blocks) };
            assert_eq!(disk.perform(&mut host, verify(1, 5119)), Ok(()));
            // The image has become shorter: the last half MiB is gone.
            image.as_file().set_len(2 << 20).unwrap();
            assert_eq!(disk.perform(&mut host, verify(0, 5120)), Err(DiskError::Read));
            assert_eq!(disk.perform(&mut host, verify(0, 4096)), Ok(()));
        }
    }
}
