//! Controller registers (3.1).

use super::bits::{bit_fields, open_enum};
use crate::QueueId;

open_enum! {
    /// A controller register's offset in bytes from the start of BAR 0 (3.1, figure 68).
    Register(u32) {
        /// Controller Capabilities, 64 bits.
        CAP = 0x00,
        /// Version.
        VS = 0x08,
        /// Interrupt Mask Set.
        INTMS = 0x0c,
        /// Interrupt Mask Clear.
        INTMC = 0x10,
        /// Controller Configuration.
        CC = 0x14,
        /// Controller Status.
        CSTS = 0x1c,
        /// NVM Subsystem Reset.
        NSSR = 0x20,
        /// Admin Queue Attributes.
        AQA = 0x24,
        /// Admin Submission Queue Base Address, 64 bits.
        ASQ = 0x28,
        /// Admin Completion Queue Base Address, 64 bits.
        ACQ = 0x30,
        /// Controller Memory Buffer Location.
        CMBLOC = 0x38,
        /// Controller Memory Buffer Size.
        CMBSZ = 0x3c,
        /// Boot Partition Information.
        BPINFO = 0x40,
        /// Boot Partition Read Select.
        BPRSEL = 0x44,
        /// Boot Partition Memory Buffer Location, 64 bits.
        BPMBL = 0x48,
        /// Controller Memory Buffer Memory Space Control, 64 bits.
        CMBMSC = 0x50,
        /// Controller Memory Buffer Status.
        CMBSTS = 0x58,
        /// Persistent Memory Region Capabilities.
        PMRCAP = 0xe00,
        /// Persistent Memory Region Control.
        PMRCTL = 0xe04,
        /// Persistent Memory Region Status.
        PMRSTS = 0xe08,
        /// Persistent Memory Region Elasticity Buffer Size.
        PMREBS = 0xe0c,
        /// Persistent Memory Region Sustained Write Throughput.
        PMRSWTP = 0xe10,
        /// Persistent Memory Region Controller Memory Space Control, 64 bits.
        PMRMSC = 0xe14,
    }
}

/// Where the doorbells begin, in bytes from the start of BAR 0 (3.1.24).
pub const DOORBELLS: u32 = 0x1000;

/// The index of a queue's doorbell in the array of doorbells: its submission queue's tail, or its completion
/// queue's head (3.1.24, 3.1.25).
pub const fn doorbell_index(queue: QueueId, completion: bool) -> usize {
    (queue.0 as usize) << 1 | completion as usize
}

/// The offset in bytes from the start of BAR 0 of the doorbell at `index`, with CAP.DSTRD `stride`;
/// `u64::MAX` if there is no such number.
pub const fn doorbell_offset(index: usize, stride: u8) -> u64 {
    let apart = 4_u64.wrapping_shl(stride as u32 & 0xf);
    (DOORBELLS as u64).saturating_add((index as u64).saturating_mul(apart))
}

bit_fields! {
    /// CAP: Controller Capabilities (3.1.1).
    Capabilities(u64) {
        /// MQES: the largest queue, in entries less one.
        field max_queue_entries / with_max_queue_entries: u16 [15:0];
        /// CQR: queues must be physically contiguous.
        flag contiguous_queues / with_contiguous_queues [16];
        /// AMS: arbitration mechanisms besides round robin.
        field arbitration / with_arbitration: u8 [18:17];
        /// TO: how long CSTS.RDY may take to follow CC.EN, in units of 500 ms.
        field timeout / with_timeout: u8 [31:24];
        /// DSTRD: doorbells are `4 << stride` bytes apart.
        field doorbell_stride / with_doorbell_stride: u8 [35:32];
        /// NSSRS: NVM Subsystem Reset is supported.
        flag subsystem_reset / with_subsystem_reset [36];
        /// CSS bit 0: the NVM command set is supported.
        flag nvm_command_set / with_nvm_command_set [37];
        /// CSS bit 7: no I/O command set is supported.
        flag admin_only / with_admin_only [44];
        /// BPS: boot partitions are supported.
        flag boot_partitions / with_boot_partitions [45];
        /// MPSMIN: the smallest memory page is `1 << (12 + MPSMIN)` bytes.
        field min_page / with_min_page: u8 [51:48];
        /// MPSMAX: the largest memory page is `1 << (12 + MPSMAX)` bytes.
        field max_page / with_max_page: u8 [55:52];
        /// PMRS: a persistent memory region is supported.
        flag persistent_memory / with_persistent_memory [56];
        /// CMBS: a controller memory buffer is supported.
        flag memory_buffer / with_memory_buffer [57];
    }
}

bit_fields! {
    /// VS: Version (3.1.2); also Identify Controller's VER.
    Version(u32) {
        /// TER: tertiary version.
        field tertiary / with_tertiary: u8 [7:0];
        /// MNR: minor version.
        field minor / with_minor: u8 [15:8];
        /// MJR: major version.
        field major / with_major: u16 [31:16];
    }
}

impl Version {
    /// 1.4.0.
    pub const V1_4: Self = Self::from_bits(0x0001_0400);
}

bit_fields! {
    /// CC: Controller Configuration (3.1.5).
    Configuration(u32) {
        /// EN: enable.
        flag enable / with_enable [0];
        /// CSS: I/O command set selected; 0 is NVM, 7 is admin only.
        field command_set / with_command_set: u8 [6:4];
        /// MPS: memory pages are `1 << (12 + MPS)` bytes.
        field page / with_page: u8 [10:7];
        /// AMS: arbitration mechanism selected; 0 is round robin.
        field arbitration / with_arbitration: u8 [13:11];
        /// SHN: see [`ShutdownNotification`].
        field shutdown_bits / with_shutdown_bits: u8 [15:14];
        /// IOSQES: log2 of an I/O submission entry's size, 6.
        field submission_entry / with_submission_entry: u8 [19:16];
        /// IOCQES: log2 of an I/O completion entry's size, 4.
        field completion_entry / with_completion_entry: u8 [23:20];
    }
}

impl Configuration {
    /// SHN.
    pub const fn shutdown(self) -> ShutdownNotification {
        ShutdownNotification(self.shutdown_bits())
    }

    /// With SHN set.
    #[must_use]
    pub const fn with_shutdown(self, value: ShutdownNotification) -> Self {
        self.with_shutdown_bits(value.0)
    }
}

open_enum! {
    /// CC.SHN (3.1.5).
    ShutdownNotification(u8) {
        /// No notification.
        NONE = 0,
        /// Normal shutdown.
        NORMAL = 1,
        /// Abrupt shutdown.
        ABRUPT = 2,
    }
}

bit_fields! {
    /// CSTS: Controller Status (3.1.6).
    ControllerStatus(u32) {
        /// RDY: ready for commands.
        flag ready / with_ready [0];
        /// CFS: a fatal error that could not be told through a completion.
        flag fatal / with_fatal [1];
        /// SHST: see [`ShutdownStatus`].
        field shutdown_bits / with_shutdown_bits: u8 [3:2];
        /// NSSRO: an NVM subsystem reset occurred; write 1 to clear.
        flag subsystem_reset_occurred / with_subsystem_reset_occurred [4];
        /// PP: processing of commands is paused.
        flag paused / with_paused [5];
    }
}

impl ControllerStatus {
    /// SHST.
    pub const fn shutdown(self) -> ShutdownStatus {
        ShutdownStatus(self.shutdown_bits())
    }

    /// With SHST set.
    #[must_use]
    pub const fn with_shutdown(self, value: ShutdownStatus) -> Self {
        self.with_shutdown_bits(value.0)
    }
}

open_enum! {
    /// CSTS.SHST (3.1.6).
    ShutdownStatus(u8) {
        /// Normal operation.
        NONE = 0,
        /// Shutdown is under way.
        OCCURRING = 1,
        /// Shutdown is complete.
        COMPLETE = 2,
    }
}

bit_fields! {
    /// AQA: Admin Queue Attributes (3.1.8).
    AdminQueueAttributes(u32) {
        /// ASQS: the admin submission queue's entries less one.
        field submission_size / with_submission_size: u16 [11:0];
        /// ACQS: the admin completion queue's entries less one.
        field completion_size / with_completion_size: u16 [27:16];
    }
}
