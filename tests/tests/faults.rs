//! Public faults of our peers, against the server's drive over a real socket. docs/faults.md lists them.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use outboard_server::control::Service;
use outboard_server::nvme::{DoorbellMode, Drive, Options};
use outboard_tests::conformance::checks;
use outboard_tests::drive::connect;
use outboard_vfio_user::client::{Client, Delivery, Memory, Sharing};
use outboard_vfio_user::dma::Iova;
use outboard_vfio_user::memory::{Access, SharedMemory};
use vm_memory::Bytes;

const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;

const PAGE: u64 = 4096;
/// Two pages of submissions, 64 bytes each.
const ENTRIES: u64 = 128;

/// The drive's registers.
struct Registers<'a>(&'a Client);

impl Registers<'_> {
    fn read(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.0.region_read(0, offset, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn write(&self, offset: u64, value: &[u8]) {
        self.0.region_write(0, offset, value, Delivery::Replied).unwrap();
    }

    /// Enables the controller, its admin queues at these places.
    fn enable(&self, submissions: u64, completions: u64) {
        self.write(CC, &0_u32.to_le_bytes());
        self.wait("it is disabled", |status| status & 1 == 0);
        let last = (ENTRIES - 1) as u32;
        self.write(AQA, &(last << 16 | last).to_le_bytes());
        self.write(ASQ, &submissions.to_le_bytes());
        self.write(ACQ, &completions.to_le_bytes());
        self.write(CC, &0x0046_0001_u32.to_le_bytes());
        self.wait("it is ready", |status| status & 1 == 1);
    }

    fn wait(&self, what: &str, done: impl Fn(u32) -> bool) {
        let begin = Instant::now();
        while !done(self.read(CSTS)) {
            assert!(begin.elapsed() < Duration::from_secs(10), "{what}: CSTS {:#x}", self.read(CSTS));
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Its queues in two DMA regions of two files, or where there is no memory: the one works, the other is said by CFS.
#[test]
fn fault_32_queues_across_regions_and_out_of_memory() {
    for (sharing, doorbells) in
        [(Sharing::Descriptor, DoorbellMode::Mapped), (Sharing::Messages, DoorbellMode::Posted)]
    {
        let options = Options {
            namespaces: vec!["null:1M".parse().unwrap()],
            doorbells,
            doorbell_stride: 0,
            queue_pairs: 1,
            queue_entries: 64,
            serial: "TEST".into(),
            model: "Test drive".into(),
        };
        let server = Arc::new(Drive::new(options).unwrap());
        let (client, session) = connect(&server);
        let registers = Registers(&client);
        client.region_write(7, 4, &[6, 0], Delivery::Replied).unwrap();

        // Nothing is mapped there.
        registers.enable(0xdead_0000, 0xdead_2000);
        registers.write(DOORBELLS, &1_u32.to_le_bytes());
        registers.wait("it says that it failed", |status| status & 2 == 2);

        let files = [(); 2].map(|()| SharedMemory::new("queue", 2 * PAGE as usize).unwrap());
        let (first, second) = (0x10_0000, 0x10_1000);
        let map = |iova: u64, file: &'_ SharedMemory, pages: u64| {
            let memory = Memory { file: file.as_fd(), offset: 0, length: (pages * PAGE) as usize };
            client.dma_map(Iova(iova), memory, Access::ReadWrite, sharing).unwrap();
        };
        map(first, &files[0], 1);
        map(second, &files[1], 2);
        // The submissions are in both regions, the completions behind them.
        let completions = second + PAGE;
        registers.enable(first, completions);
        for index in 0..ENTRIES + 10 {
            let slot = index % ENTRIES;
            let (file, at) = (&files[(slot / 64) as usize], (slot % 64 * 64) as usize);
            // Get Features, Number of Queues.
            let mut entry = [0; 64];
            entry[0] = 0x0a;
            entry[2..4].copy_from_slice(&(index as u16).to_le_bytes());
            entry[40] = 0x07;
            file.bytes().write_slice(&entry, at).unwrap();
            let tail = ((index + 1) % ENTRIES) as u32;
            registers.write(DOORBELLS, &tail.to_le_bytes());
            let completion = PAGE as usize + slot as usize * 16;
            let phase = u16::from(index < ENTRIES);
            let begin = Instant::now();
            let done = loop {
                let words: [u16; 8] = files[1].bytes().read_obj(completion).unwrap();
                if words[7] & 1 == phase && words[6] == index as u16 {
                    break words;
                }
                assert!(begin.elapsed() < Duration::from_secs(10), "{index}: {words:x?}");
                thread::yield_now();
            };
            assert_eq!(done[7] >> 1, 0, "{index}");
            registers.write(DOORBELLS + 4, &tail.to_le_bytes());
        }
        drop(client);
        session.join().unwrap();
        server.stop();
    }
}

/// The tests and points that docs/faults.md names exist.
#[test]
fn what_the_list_of_faults_names_is_there() {
    fn sources(directory: &Path, all: &mut String) {
        for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            let hidden = entry.file_name().to_string_lossy().starts_with('.');
            if kind.is_dir() && !hidden && entry.file_name() != "target" {
                sources(&path, all);
            } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "sh") {
                all.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut all = String::new();
    sources(root, &mut all);
    let list = std::fs::read_to_string(root.join("docs/faults.md")).unwrap();
    let rows = list.lines().filter(|line| line.starts_with('|') && line.contains(char::is_numeric));
    for row in rows {
        let is_name = |word: &&str| {
            word.contains('_')
                && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        for name in row.split('`').skip(1).step_by(2).filter(is_name) {
            let there = [format!("fn {name}("), format!("scenario {name}."), format!("{name}() {{")];
            assert!(there.iter().any(|text| all.contains(text)), "{name} in {row}");
        }
        let text = row.split('|').nth(3).unwrap();
        let words: Vec<_> = text.split([' ', ',', ';', '.', ':']).filter(|word| !word.is_empty()).collect();
        let points = words.iter().skip_while(|word| !word.to_lowercase().starts_with("point")).skip(1);
        for point in points.take_while(|word| **word == "and" || word.parse::<u8>().is_ok()) {
            let known = point.parse::<u8>().is_ok_and(|point| checks().any(|check| check.point == point));
            assert!(known || *point == "and", "point {point} in {row}");
        }
    }
}
