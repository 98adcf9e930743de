//! The device without a client: accesses of any width to any of BAR0, resets.

use std::ops::Deref;
use std::sync::mpsc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const CC: u64 = 0x14;
const COMMAND: u64 = 0x04;
const QUEUE_PAIRS: u16 = 600;

/// A drive whose thread ends with it.
struct Running(Drive);

impl Deref for Running {
    type Target = Drive;

    fn deref(&self) -> &Drive {
        &self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn drive(doorbells: DoorbellMode) -> Running {
    let options = Options {
        namespaces: vec!["ram:1M".parse().unwrap()],
        doorbells,
        doorbell_stride: 0,
        queue_pairs: QUEUE_PAIRS,
        queue_entries: 64,
        serial: "s".into(),
        model: "m".into(),
    };
    Running(Drive::new(options).unwrap())
}

fn answer<T: Send + 'static>(ask: impl FnOnce(Reply<T>)) -> Result<T, Errno> {
    let (send, receive) = mpsc::channel();
    ask(Reply::new(move |result| send.send(result).unwrap()));
    receive.recv_timeout(Duration::from_secs(5)).expect("an answer")
}

fn read(drive: &Drive, region: u32, offset: u64, length: usize) -> Vec<u8> {
    let data = answer(|reply| drive.read(region, offset, length, reply)).unwrap();
    assert_eq!(data.len(), length);
    data
}

fn write(drive: &Drive, region: u32, offset: u64, data: &[u8]) {
    answer(|reply| drive.write(region, offset, data, reply)).unwrap();
}

/// The offset of a capability, by its identifier.
fn capability(drive: &Drive, id: u8) -> u64 {
    let mut at = read(drive, CONFIG, 0x34, 1)[0];
    while at != 0 {
        let header = read(drive, CONFIG, at.into(), 2);
        if header[0] == id {
            return at.into();
        }
        at = header[1];
    }
    panic!("no capability {id:#x}");
}

/// Fault 43: and how nothing can.
#[test]
fn what_can_be_mapped() {
    let mapped = drive(DoorbellMode::Mapped);
    let regions = &mapped.description().regions;
    let mappable = regions[0].mappable.as_ref().unwrap();
    assert_eq!(mappable.areas, [SparseArea { offset: PAGE, size: mapped.layout.doorbells }]);
    assert_eq!((mappable.offset, mappable.msix), (0, false));
    let file = nix::sys::stat::fstat(mapped.file(BAR0).unwrap()).unwrap().st_size;
    assert!(file as u64 >= PAGE + mapped.layout.doorbells, "no store faults");
    let whole = drive(DoorbellMode::WholeBar);
    let mappable = whole.description().regions[0].mappable.as_ref().unwrap();
    assert!(mappable.areas.is_empty() && mappable.msix, "all of it");
    assert_eq!(nix::sys::stat::fstat(whole.file(BAR0).unwrap()).unwrap().st_size as u64, whole.layout.size);
    assert!(whole.layout.size >= 0x1_0000);
    let posted = drive(DoorbellMode::Posted);
    // QEMU posts no write to a device of which anything can be mapped.
    assert!(posted.description().regions.iter().all(|region| region.mappable.is_none()));
    assert_eq!(posted.description().regions[0].size, mapped.description().regions[0].size);
}

/// BAR0 as bytes, and the doorbells behind it.
struct Model {
    bytes: Vec<u8>,
    doorbells: Vec<u32>,
    rung: u64,
}

impl Model {
    fn write(&mut self, layout: Layout, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            let kept = match layout.part(at) {
                (Part::Registers, AQA..AQA_END) => [0xff, 0x0f][(at & 1) as usize],
                (Part::Registers, ASQ..ACQ_END) => {
                    [0, 0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff][(at & 7) as usize]
                }
                (Part::Table, at) if at < u64::from(QUEUE_PAIRS + 1) * 16 => match at % 16 {
                    0..12 => 0xff,
                    12 => 1,
                    _ => 0,
                },
                _ => 0,
            };
            let place = &mut self.bytes[at as usize];
            *place = *place & !kept | byte & kept;
        }
        // A doorbell is rung by one whole dword; what else lies in another page does not make it less whole.
        let (start, end) = (offset.max(PAGE), (offset + data.len() as u64).min(layout.table));
        let pages: Vec<u64> = (start..end).filter(|at| *at == start || at % PAGE == 0).collect();
        for (index, &from) in pages.iter().enumerate() {
            let to = pages.get(index + 1).copied().unwrap_or(end);
            if to - from == 4 && from.is_multiple_of(4) {
                let dword = &data[(from - offset) as usize..][..4];
                self.doorbells[((from - PAGE) / 4) as usize] = u32::from_le_bytes(dword.try_into().unwrap());
                self.rung += 1;
            }
        }
    }
}

const AQA_END: u64 = AQA + 4;
const ACQ_END: u64 = 0x38;

/// Offsets around what matters in BAR0. Not CC: what follows from that is the controller's.
fn place() -> impl Strategy<Value = u64> {
    let layout = Layout::new(QUEUE_PAIRS, QUEUE_PAIRS + 1, 0, 0);
    prop_oneof![
        AQA..0x60_u64,
        PAGE - 24..PAGE + 24,
        2 * PAGE - 24..2 * PAGE + 8,
        (0..u64::from(QUEUE_PAIRS)).prop_map(|pair| PAGE + pair * 8),
        layout.table - 24..layout.table + 64,
        layout.table + PAGE - 24..layout.table + PAGE + 8,
        layout.pending - 24..layout.pending + 24,
    ]
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>();
    prop_oneof![
        4 => vec(byte, 4..=4),
        1 => vec(byte, 1..=2),
        1 => vec(byte, 8..=8),
        1 => vec(byte, 1..64),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Fault 48.
    #[test]
    fn accesses_of_any_width_anywhere(
        writes in vec((place(), data()), 0..40),
        reads in vec((place(), 1..5000_usize), 1..10),
    ) {
        let drive = drive(DoorbellMode::Posted);
        let size = drive.layout.size as usize;
        let mut model = Model {
            bytes: read(&drive, BAR0, 0, size),
            doorbells: vec![0; drive.layout.doorbells as usize / 4],
            rung: 0,
        };
        for (offset, data) in writes {
            write(&drive, BAR0, offset, &data);
            model.write(drive.layout, offset, &data);
        }
        let bar = read(&drive, BAR0, 0, size);
        let wrong = bar.iter().zip(&model.bytes).position(|(ours, theirs)| ours != theirs);
        prop_assert!(wrong.is_none(), "byte {:#x?}", wrong);
        for (offset, length) in reads {
            let length = length.min(size - offset as usize);
            prop_assert_eq!(read(&drive, BAR0, offset, length), &bar[offset as usize..][..length]);
        }
        let doorbells: Vec<u32> = (0..model.doorbells.len()).map(|index| drive.bar().doorbell(index)).collect();
        prop_assert_eq!(doorbells, model.doorbells);
        prop_assert_eq!(drive.posted.get(), model.rung);
    }
}

#[test]
fn capabilities_and_version_in_any_width() {
    let drive = drive(DoorbellMode::Mapped);
    let capabilities = read(&drive, BAR0, 0, 8);
    assert_eq!(u64::from_le_bytes(capabilities[..].try_into().unwrap()) & 0xffff, 63, "MQES of 64 entries");
    for (offset, length) in [(0, 1), (3, 2), (0, 4), (4, 4), (1, 7)] {
        assert_eq!(read(&drive, BAR0, offset, length), capabilities[offset as usize..][..length]);
    }
    assert_eq!(read(&drive, BAR0, 0x08, 4), [0, 4, 1, 0], "NVMe 1.4");
    let first = drive.layout.table;
    assert_eq!(read(&drive, BAR0, first + 12, 4), [1, 0, 0, 0], "masked at first");
}

#[test]
fn both_resets_are_power_on() {
    let function_level = |drive: &Drive| {
        let control = capability(drive, 0x10) + 8;
        write(drive, CONFIG, control + 1, &[0x80]);
    };
    let device = |drive: &Drive| answer(|reply| drive.reset(reply)).unwrap();
    let resets: [&dyn Fn(&Drive); 2] = [&function_level, &device];
    for reset in resets {
        let drive = drive(DoorbellMode::Mapped);
        let (bar, config) = (read(&drive, BAR0, 0, 0x9000), read(&drive, CONFIG, 0, 4096));
        let msix = capability(&drive, 0x11);
        write(&drive, CONFIG, COMMAND, &[6, 4]);
        write(&drive, CONFIG, 0x10, &[0, 0, 0, 0xfe, 1, 0, 0, 0]);
        write(&drive, CONFIG, msix + 3, &[0x80]);
        write(&drive, BAR0, AQA, &[31, 0, 31, 0]);
        write(&drive, BAR0, ASQ, &[0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0]);
        write(&drive, BAR0, CC, &[0, 0, 0x46, 0]);
        write(&drive, BAR0, drive.layout.table, &[0x11; 16]);
        assert_ne!(read(&drive, BAR0, 0, 0x9000), bar);
        assert_ne!(read(&drive, CONFIG, 0, 4096), config);
        reset(&drive);
        assert_eq!(read(&drive, BAR0, 0, 0x9000), bar);
        assert_eq!(read(&drive, CONFIG, 0, 4096), config);
    }
}

#[test]
fn regions_that_do_not_exist() {
    let drive = drive(DoorbellMode::Mapped);
    for region in [1, 5, 6, 8] {
        assert_eq!(answer(|reply| drive.read(region, 0, 4, reply)), Err(Errno::EINVAL));
        assert_eq!(answer(|reply| drive.write(region, 0, &[0; 4], reply)), Err(Errno::EINVAL));
        assert_eq!(drive.description().regions[region as usize].size, 0);
    }
}
