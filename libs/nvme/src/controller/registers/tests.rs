use proptest::prelude::*;

use super::*;

const CAP: Capabilities = Capabilities::from_bits(0x0000_0030_3c01_03ff);

fn read32(registers: &Registers, register: Register) -> u32 {
    let mut bytes = [0; 4];
    registers.read(register.0.into(), &mut bytes);
    u32::from_le_bytes(bytes)
}

fn write32(registers: &Registers, register: Register, value: u32) {
    let _ = registers.write(register.0.into(), &value.to_le_bytes());
}

/// The registers as bytes, with the rules of section 3.1 for each.
#[derive(Clone)]
struct Model {
    bytes: [u8; 64],
    generation: u32,
}

impl Model {
    fn dword(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    fn set(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn write(&mut self, offset: usize, from: &[u8]) {
        let first = offset & !3;
        for dword in (first..offset + from.len()).step_by(4) {
            let covered: Vec<usize> =
                (dword..dword + 4).filter(|at| (offset..offset + from.len()).contains(at)).collect();
            let byte = |at: usize| u32::from(from[at - offset]) << (8 * (at - dword));
            let value = covered.iter().map(|at| byte(*at)).fold(0, |a, b| a | b);
            let mask = covered.iter().map(|at| 0xff << (8 * (at - dword))).fold(0, |a, b| a | b);
            self.write_dword(dword, value, mask);
        }
    }

    fn write_dword(&mut self, at: usize, value: u32, mask: u32) {
        if at >= 64 {
            return;
        }
        let old = self.dword(at);
        let merged = (old & !mask) | value;
        match at {
            0x0c | 0x10 => {
                let new = if at == 0x0c { old | value } else { old & !value };
                self.set(0x0c, new);
                self.set(0x10, new);
            }
            0x14 => {
                let new = merged & 0x00ff_fff1;
                match (old & 1, new & 1) {
                    (1, 1) => self.set(at, (new & !0x3ff0) | (old & 0x3ff0)),
                    (1, _) => {
                        self.generation += 1;
                        self.set(at, new);
                    }
                    _ => self.set(at, new),
                }
            }
            // NSSRO is cleared by 1; RDY and its like are the controller's.
            0x1c => self.set(at, old & !(value & 0x10)),
            0x20 if mask == !0 && value == 0x4e56_4d65 => {
                self.generation += 1;
                [0x0c, 0x10, 0x14, 0x24, 0x28, 0x2c, 0x30, 0x34].into_iter().for_each(|at| self.set(at, 0));
                self.set(0x1c, 0x10);
            }
            0x24 => self.set(at, merged & 0x0fff_0fff),
            0x28 | 0x30 => self.set(at, merged & !0xfff),
            0x2c | 0x34 => self.set(at, merged),
            _ => {}
        }
    }
}

#[derive(Clone, Debug)]
enum Access {
    Read(u64, usize),
    Write(u64, Vec<u8>),
}

fn access() -> impl Strategy<Value = Access> {
    let offset = prop_oneof![8 => 0_u64..0x48, 1 => 0xff0_u64..0x1010, 1 => any::<u64>()];
    let length = prop_oneof![Just(1_usize), Just(2), Just(4), Just(4), Just(8), 0_usize..40];
    prop_oneof![
        (offset.clone(), length.clone()).prop_map(|(offset, length)| Access::Read(offset, length)),
        (offset, length)
            .prop_flat_map(|(offset, length)| (Just(offset), prop::collection::vec(any::<u8>(), length)))
            .prop_map(|(offset, bytes)| Access::Write(offset, bytes)),
        Just(Access::Write(0x20, b"eMVN".to_vec())),
        Just(Access::Write(0x1c, vec![0x10])),
        // EN alone, so that it toggles often.
        (0_u8..2).prop_map(|enable| Access::Write(0x14, vec![enable])),
    ]
}

proptest! {
    #[test]
    fn every_width_and_alignment_does_what_bytes_would(
        accesses in prop::collection::vec(access(), 0..60),
    ) {
        let registers = Registers::new(CAP);
        let mut model = Model { bytes: [0; 64], generation: 0 };
        model.bytes[..8].copy_from_slice(&CAP.bits().to_le_bytes());
        model.set(8, 0x0001_0400);
        for access in accesses {
            match access {
                Access::Read(offset, length) => {
                    let mut bytes = vec![0xee; length];
                    registers.read(offset, &mut bytes);
                    let at = |index: u64| offset.checked_add(index).and_then(|at| usize::try_from(at).ok());
                    let expected: Vec<u8> = (0..length as u64)
                        .map(|index| at(index).and_then(|at| model.bytes.get(at)).copied().unwrap_or(0))
                        .collect();
                    prop_assert_eq!(bytes, expected);
                }
                Access::Write(offset, bytes) => {
                    let _ = registers.write(offset, &bytes);
                    if offset < 0x1000 {
                        model.write(offset as usize, &bytes);
                    }
                }
            }
            prop_assert_eq!(registers.control().generation, model.generation);
        }
    }
}

#[test]
fn a_quick_toggle_of_enable_leaves_a_trace_and_hides_the_old_life() {
    let registers = Registers::new(CAP);
    write32(&registers, Register::CC, 1);
    registers.set_status(registers.control().generation, ControllerStatus::default().with_ready(true));
    assert_eq!(read32(&registers, Register::CSTS), 1);
    let before = registers.control();
    write32(&registers, Register::CC, 0);
    assert_eq!(read32(&registers, Register::CSTS), 1, "RDY stays until the controller is quiet");
    write32(&registers, Register::CC, 1);
    assert_eq!(read32(&registers, Register::CSTS), 0, "RDY of the life before is not the new one's");
    assert_ne!(registers.control(), before);
}

#[test]
fn reset_brings_the_defaults_back() {
    let registers = Registers::new(CAP);
    for register in [Register::CC, Register::AQA, Register::ASQ, Register::ACQ, Register::INTMS] {
        write32(&registers, register, 0xffff_ffff);
        assert_ne!(read32(&registers, register), 0);
    }
    assert_eq!(registers.reset(), Effect::Wake);
    for register in [Register::CC, Register::AQA, Register::ASQ, Register::ACQ, Register::INTMS] {
        assert_eq!(read32(&registers, register), 0);
    }
}

#[test]
fn only_the_power_and_the_host_take_back_that_the_subsystem_was_reset() {
    let registers = Registers::new(CAP);
    write32(&registers, Register::CC, 1);
    write32(&registers, Register::ASQ, 0x1000);
    write32(&registers, Register::NSSR, 0x4e56_4d66);
    let _ = registers.write(u64::from(Register::NSSR.0), b"eMV");
    assert_eq!((read32(&registers, Register::CC), read32(&registers, Register::CSTS)), (1, 0));
    assert_eq!(registers.write(Register::NSSR.0.into(), b"eMVN"), Effect::Wake);
    assert_eq!((read32(&registers, Register::CC), read32(&registers, Register::ASQ)), (0, 0));
    assert_eq!(read32(&registers, Register::NSSR), 0);
    let _ = registers.reset();
    write32(&registers, Register::CSTS, !0x10);
    assert_eq!(read32(&registers, Register::CSTS), 0x10);
    write32(&registers, Register::CSTS, 0x10);
    assert_eq!(read32(&registers, Register::CSTS), 0);
    write32(&registers, Register::NSSR, 0x4e56_4d65);
    let _ = registers.power_cycle();
    assert_eq!(read32(&registers, Register::CSTS), 0);
}

#[test]
fn only_aligned_dwords_ring_doorbells() {
    assert_eq!(doorbell_write(0x1000, &[1, 2, 0, 0], 0), Some((0, 0x201)));
    assert_eq!(doorbell_write(0x100c, &[9, 0, 0, 0], 0), Some((3, 9)));
    for (offset, bytes) in [(0xffc, 4), (0x1002, 4), (0x1001, 1), (0x1000, 2), (0x1000, 8), (0x1000, 0)] {
        assert_eq!(doorbell_write(offset, &vec![0; bytes], 0), None);
    }
    // Each doorbell in its own page.
    assert_eq!(doorbell_write(0x3000, &[7, 0, 0, 0], 10), Some((2, 7)));
    assert_eq!(doorbell_write(0x3004, &[7, 0, 0, 0], 10), None);
}

#[test]
fn what_the_controller_must_act_upon_wakes_it() {
    let registers = Registers::new(CAP);
    assert_eq!(registers.write(0x14, &[1]), Effect::Wake);
    assert_eq!(registers.write(0x0c, &[1, 0, 0, 0]), Effect::Wake);
    assert_eq!(registers.write(0x10, &[0, 0, 0, 0, 1]), Effect::Wake, "it crosses into CC");
    assert_eq!(registers.write(0x24, &[0; 20]), Effect::None);
    assert_eq!(registers.write(0x0, &[0xff; 12]), Effect::None);
}
