//! Features (5.21.1).

use std::mem::offset_of;

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::bits::{bit_fields, open_enum};

open_enum! {
    /// FID: feature identifier (5.21.1, figure 271).
    FeatureId(u8) {
        /// Arbitration.
        ARBITRATION = 0x01,
        /// Power Management.
        POWER_MANAGEMENT = 0x02,
        /// LBA Range Type.
        LBA_RANGE_TYPE = 0x03,
        /// Temperature Threshold.
        TEMPERATURE_THRESHOLD = 0x04,
        /// Error Recovery.
        ERROR_RECOVERY = 0x05,
        /// Volatile Write Cache.
        VOLATILE_WRITE_CACHE = 0x06,
        /// Number of Queues.
        NUMBER_OF_QUEUES = 0x07,
        /// Interrupt Coalescing.
        INTERRUPT_COALESCING = 0x08,
        /// Interrupt Vector Configuration.
        INTERRUPT_VECTOR_CONFIGURATION = 0x09,
        /// Write Atomicity Normal.
        WRITE_ATOMICITY = 0x0a,
        /// Asynchronous Event Configuration.
        ASYNC_EVENT_CONFIGURATION = 0x0b,
        /// Autonomous Power State Transition.
        AUTONOMOUS_POWER_STATE = 0x0c,
        /// Host Memory Buffer.
        HOST_MEMORY_BUFFER = 0x0d,
        /// Timestamp.
        TIMESTAMP = 0x0e,
        /// Keep Alive Timer.
        KEEP_ALIVE_TIMER = 0x0f,
        /// Host Controlled Thermal Management.
        HOST_THERMAL_MANAGEMENT = 0x10,
        /// Non-Operational Power State Config.
        NON_OPERATIONAL_POWER_STATE = 0x11,
        /// Read Recovery Level Config.
        READ_RECOVERY_LEVEL = 0x12,
        /// Predictable Latency Mode Config.
        PREDICTABLE_LATENCY_CONFIG = 0x13,
        /// Predictable Latency Mode Window.
        PREDICTABLE_LATENCY_WINDOW = 0x14,
        /// LBA Status Information Report Interval.
        LBA_STATUS_INTERVAL = 0x15,
        /// Host Behavior Support.
        HOST_BEHAVIOR_SUPPORT = 0x16,
        /// Sanitize Config.
        SANITIZE_CONFIG = 0x17,
        /// Endurance Group Event Configuration.
        ENDURANCE_GROUP_EVENT = 0x18,
        /// Software Progress Marker.
        SOFTWARE_PROGRESS_MARKER = 0x80,
        /// Host Identifier.
        HOST_IDENTIFIER = 0x81,
        /// Reservation Notification Mask.
        RESERVATION_NOTIFICATION_MASK = 0x82,
        /// Reservation Persistence.
        RESERVATION_PERSISTENCE = 0x83,
        /// Namespace Write Protection Config.
        WRITE_PROTECTION = 0x84,
    }
}

open_enum! {
    /// SEL: which value of a feature Get Features returns (5.9, figure 187).
    FeatureSelect(u8) {
        /// Current.
        CURRENT = 0,
        /// Default.
        DEFAULT = 1,
        /// Saved.
        SAVED = 2,
        /// Supported capabilities: see [`FeatureCapabilities`].
        CAPABILITIES = 3,
    }
}

bit_fields! {
    /// The result of Get Features with [`FeatureSelect::CAPABILITIES`] (5.9, figure 188).
    FeatureCapabilities(u32) {
        /// The value can be saved.
        flag saveable / with_saveable [0];
        /// The value is the namespace's own.
        flag namespace_specific / with_namespace_specific [1];
        /// The value can be changed.
        flag changeable / with_changeable [2];
    }
}

bit_fields! {
    /// Arbitration (5.21.1.1).
    Arbitration(u32) {
        /// AB: log2 of the commands taken from a queue at once; 7 is no limit.
        field burst / with_burst: u8 [2:0];
        /// LPW: low priority weight less one.
        field low_weight / with_low_weight: u8 [15:8];
        /// MPW: medium priority weight less one.
        field medium_weight / with_medium_weight: u8 [23:16];
        /// HPW: high priority weight less one.
        field high_weight / with_high_weight: u8 [31:24];
    }
}

bit_fields! {
    /// Power Management (5.21.1.2).
    PowerManagement(u32) {
        /// PS: power state.
        field state / with_state: u8 [4:0];
        /// WH: workload hint.
        field workload / with_workload: u8 [7:5];
    }
}

bit_fields! {
    /// Temperature Threshold (5.21.1.4).
    TemperatureThreshold(u32) {
        /// TMPTH: the threshold in kelvin.
        field kelvin / with_kelvin: u16 [15:0];
        /// TMPSEL: 0 is the composite temperature, 1-8 a sensor, 15 all.
        field sensor / with_sensor: u8 [19:16];
        /// THSEL: 0 over, 1 under temperature.
        field threshold_type / with_threshold_type: u8 [21:20];
    }
}

bit_fields! {
    /// Error Recovery (5.21.1.5).
    ErrorRecovery(u32) {
        /// TLER: time limit in units of 100 ms; 0 is none.
        field time_limit / with_time_limit: u16 [15:0];
        /// DULBE: reading a deallocated block is an error.
        flag deallocated_error / with_deallocated_error [16];
    }
}

bit_fields! {
    /// Volatile Write Cache (5.21.1.6).
    VolatileWriteCache(u32) {
        /// WCE: enabled.
        flag enabled / with_enabled [0];
    }
}

bit_fields! {
    /// Number of Queues: dword 11 of Set Features, and the result's counts of allocated queues (5.21.1.7).
    NumberOfQueues(u32) {
        /// NSQR, NSQA: I/O submission queues less one; 0xffff is illegal.
        field submission / with_submission: u16 [15:0];
        /// NCQR, NCQA: I/O completion queues less one; 0xffff is illegal.
        field completion / with_completion: u16 [31:16];
    }
}

bit_fields! {
    /// Interrupt Coalescing (5.21.1.8).
    InterruptCoalescing(u32) {
        /// THR: completions less one.
        field threshold / with_threshold: u8 [7:0];
        /// TIME: in units of 100 µs.
        field time / with_time: u8 [15:8];
    }
}

bit_fields! {
    /// Interrupt Vector Configuration (5.21.1.9).
    InterruptVectorConfiguration(u32) {
        /// IV: the vector.
        field vector / with_vector: u16 [15:0];
        /// CD: coalescing is off for it.
        flag coalescing_disabled / with_coalescing_disabled [16];
    }
}

bit_fields! {
    /// Write Atomicity Normal (5.21.1.10).
    WriteAtomicity(u32) {
        /// DN: AWUN and NAWUN need not be honoured.
        flag disable_normal / with_disable_normal [0];
    }
}

bit_fields! {
    /// Asynchronous Event Configuration (5.21.1.11).
    AsyncEventConfiguration(u32) {
        /// SMART / Health critical warnings, a bit each.
        field critical_warnings / with_critical_warnings: u8 [7:0];
        /// Namespace Attribute Notices.
        flag namespace_attributes / with_namespace_attributes [8];
        /// Firmware Activation Notices.
        flag firmware_activation / with_firmware_activation [9];
        /// Telemetry Log Notices.
        flag telemetry / with_telemetry [10];
        /// Asymmetric Namespace Access Change Notices.
        flag ana_change / with_ana_change [11];
    }
}

bit_fields! {
    /// Host Identifier: dword 11 of Get and Set Features (5.21.1.25).
    HostIdentifierSize(u32) {
        /// EXHID: it has 128 bits, not 64.
        flag extended / with_extended [0];
    }
}

impl HostIdentifierSize {
    /// Bytes of the identifier.
    pub const fn bytes(self) -> usize {
        if self.extended() { 16 } else { 8 }
    }
}

/// An entry of LBA Range Type, 64 bytes (5.21.1.3, figure 275).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct LbaRangeType {
    /// What the blocks are for; 0 is general.
    pub kind: u8,
    /// Attributes.
    pub attributes: LbaRangeAttributes,
    /// Reserved.
    pub reserved2: [u8; 14],
    /// SLBA: the first block.
    pub start: U64,
    /// NLB: blocks less one.
    pub blocks: U64,
    /// GUID: identifies the range.
    pub guid: [u8; 16],
    /// Reserved.
    pub reserved48: [u8; 16],
}

impl LbaRangeType {
    /// Bytes of the list, of up to 64 entries, that the feature's data is.
    pub const LIST_SIZE: usize = 4096;
}

const _: () = {
    assert!(size_of::<LbaRangeType>() == 64);
    assert!(offset_of!(LbaRangeType, blocks) == 24);
};

bit_fields! {
    /// Attributes of an LBA range (figure 275).
    LbaRangeAttributes(u8) {
        /// The blocks may be overwritten.
        flag overwritable / with_overwritable [0];
        /// The range is to be hidden from the operating system.
        flag hidden / with_hidden [1];
    }
}
