//! Log pages (5.14.1) and asynchronous events (5.2).

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::bits::{bit_fields, open_enum};
use super::status::StatusField;

open_enum! {
    /// LID: log page identifier (5.14.1, figure 191).
    LogPageId(u8) {
        /// Error Information: an array of [`ErrorLogEntry`].
        ERROR_INFORMATION = 0x01,
        /// SMART / Health Information: [`SmartLog`].
        SMART = 0x02,
        /// Firmware Slot Information: [`FirmwareSlotLog`].
        FIRMWARE_SLOT = 0x03,
        /// Changed Namespace List.
        CHANGED_NAMESPACES = 0x04,
        /// Commands Supported and Effects: [`CommandsSupportedLog`].
        COMMANDS_SUPPORTED = 0x05,
        /// Device Self-test.
        DEVICE_SELF_TEST = 0x06,
        /// Telemetry Host-Initiated.
        TELEMETRY_HOST = 0x07,
        /// Telemetry Controller-Initiated.
        TELEMETRY_CONTROLLER = 0x08,
        /// Endurance Group Information.
        ENDURANCE_GROUP = 0x09,
        /// Predictable Latency Per NVM Set.
        PREDICTABLE_LATENCY_SET = 0x0a,
        /// Predictable Latency Event Aggregate.
        PREDICTABLE_LATENCY_EVENTS = 0x0b,
        /// Asymmetric Namespace Access.
        ANA = 0x0c,
        /// Persistent Event Log.
        PERSISTENT_EVENT = 0x0d,
        /// LBA Status Information.
        LBA_STATUS = 0x0e,
        /// Endurance Group Event Aggregate.
        ENDURANCE_GROUP_EVENTS = 0x0f,
        /// Reservation Notification.
        RESERVATION_NOTIFICATION = 0x80,
        /// Sanitize Status.
        SANITIZE_STATUS = 0x81,
    }
}

/// Error Information log entry, 64 bytes (5.14.1.1).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ErrorLogEntry {
    /// Unique over the controller's life, counting up; 0 is an invalid entry.
    pub error_count: U64,
    /// The submission queue; 0xffff when the error belongs to no command.
    pub submission_queue: U16,
    /// The command; 0xffff when the error belongs to no command.
    pub command_id: U16,
    /// Its status, phase tag included.
    pub status: StatusField,
    /// Where in the command the error lies.
    pub parameter_location: ParameterErrorLocation,
    /// The first LBA in error.
    pub lba: U64,
    /// The namespace.
    pub nsid: U32,
    /// The log page that holds vendor information, 80h-ffh; 0 if none.
    pub vendor_page: u8,
    /// TRTYPE: transport type; 0 is not reported.
    pub transport: u8,
    /// Reserved.
    pub reserved30: [u8; 2],
    /// Command specific information.
    pub command_specific: U64,
    /// Transport type specific information.
    pub transport_specific: U16,
    /// Reserved.
    pub reserved42: [u8; 22],
}

const _: () = {
    assert!(size_of::<ErrorLogEntry>() == 64);
    assert!(offset_of!(ErrorLogEntry, lba) == 16);
    assert!(offset_of!(ErrorLogEntry, command_specific) == 32);
};

bit_fields! {
    /// Where in a command an error lies (5.14.1.1, figure 193); all ones when in no command.
    ParameterErrorLocation(u16) {
        /// The byte.
        field byte / with_byte: u8 [7:0];
        /// The bit.
        field bit / with_bit: u8 [10:8];
    }
}

/// SMART / Health Information log, 512 bytes (5.14.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SmartLog {
    /// Critical Warning.
    pub critical_warning: CriticalWarning,
    /// Composite Temperature in kelvin.
    pub temperature: U16,
    /// Available Spare, in percent.
    pub available_spare: u8,
    /// Available Spare Threshold, in percent.
    pub spare_threshold: u8,
    /// Percentage Used; may exceed 100.
    pub percentage_used: u8,
    /// Endurance Group Critical Warning Summary.
    pub endurance_group_warning: u8,
    /// Reserved.
    pub reserved7: [u8; 25],
    /// Data Units Read, in thousands of 512 bytes, rounded up.
    pub data_units_read: U128,
    /// Data Units Written, in thousands of 512 bytes, rounded up.
    pub data_units_written: U128,
    /// Host Read Commands.
    pub host_reads: U128,
    /// Host Write Commands.
    pub host_writes: U128,
    /// Controller Busy Time, in minutes.
    pub busy_minutes: U128,
    /// Power Cycles.
    pub power_cycles: U128,
    /// Power On Hours.
    pub power_on_hours: U128,
    /// Unsafe Shutdowns.
    pub unsafe_shutdowns: U128,
    /// Media and Data Integrity Errors.
    pub media_errors: U128,
    /// Number of Error Information Log Entries over the controller's life.
    pub error_log_entries: U128,
    /// Warning Composite Temperature Time, in minutes.
    pub warning_temperature_minutes: U32,
    /// Critical Composite Temperature Time, in minutes.
    pub critical_temperature_minutes: U32,
    /// Temperature Sensors 1 to 8, in kelvin; 0 is none.
    pub sensors: [U16; 8],
    /// Thermal Management Temperature 1 and 2 Transition Counts.
    pub thermal_transitions: [U32; 2],
    /// Total Time For Thermal Management Temperature 1 and 2, in seconds.
    pub thermal_seconds: [U32; 2],
    /// Reserved.
    pub reserved232: [u8; 280],
}

const _: () = {
    assert!(size_of::<SmartLog>() == 512);
    assert!(offset_of!(SmartLog, data_units_read) == 32);
    assert!(offset_of!(SmartLog, error_log_entries) == 176);
    assert!(offset_of!(SmartLog, sensors) == 200);
};

bit_fields! {
    /// Critical Warning (5.14.1.2).
    CriticalWarning(u8) {
        /// The available spare is below its threshold.
        flag spare / with_spare [0];
        /// A temperature is beyond a threshold.
        flag temperature / with_temperature [1];
        /// Reliability is degraded.
        flag reliability / with_reliability [2];
        /// The media are read only.
        flag read_only / with_read_only [3];
        /// The volatile memory backup failed.
        flag backup_failed / with_backup_failed [4];
        /// The persistent memory region is read only or unreliable.
        flag persistent_memory / with_persistent_memory [5];
    }
}

/// Firmware Slot Information log, 512 bytes (5.14.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FirmwareSlotLog {
    /// AFI: Active Firmware Info.
    pub active: FirmwareSlotInfo,
    /// Reserved.
    pub reserved1: [u8; 7],
    /// FRS1 to FRS7: the revision in each slot, ASCII; zeroes when empty.
    pub revisions: [[u8; 8]; 7],
    /// Reserved.
    pub reserved64: [u8; 448],
}

const _: () = assert!(size_of::<FirmwareSlotLog>() == 512);

bit_fields! {
    /// AFI: Active Firmware Info (5.14.1.3).
    FirmwareSlotInfo(u8) {
        /// The slot of the running firmware, 1-7.
        field current / with_current: u8 [2:0];
        /// The slot that the next reset activates; 0 is not said.
        field next / with_next: u8 [6:4];
    }
}

/// Commands Supported and Effects log, 4096 bytes (5.14.1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CommandsSupportedLog {
    /// ACS0-ACS255, by admin opcode.
    pub admin: [CommandEffects; 256],
    /// IOCS0-IOCS255, by I/O opcode.
    pub io: [CommandEffects; 256],
    /// Reserved.
    pub reserved2048: [u8; 2048],
}

const _: () = assert!(size_of::<CommandsSupportedLog>() == 4096);

bit_fields! {
    /// What a command may do (5.14.1.5, figure 199).
    CommandEffects(u32) {
        /// CSUPP: supported.
        flag supported / with_supported [0];
        /// LBCC: may change user data.
        flag data_change / with_data_change [1];
        /// NCC: may change a namespace's capabilities.
        flag namespace_change / with_namespace_change [2];
        /// NIC: may change the inventory of namespaces.
        flag inventory_change / with_inventory_change [3];
        /// CCC: may change the controller's capabilities.
        flag controller_change / with_controller_change [4];
        /// CSE: submission and execution restrictions.
        field restrictions / with_restrictions: u8 [18:16];
        /// UUID selection is supported.
        flag uuid_selection / with_uuid_selection [19];
    }
}

bit_fields! {
    /// The result of Asynchronous Event Request (5.2.1, figure 146).
    AsyncEvent(u32) {
        /// See [`AsyncEventType`].
        field kind_bits / with_kind_bits: u8 [2:0];
        /// Asynchronous Event Information, by type.
        field information / with_information: u8 [15:8];
        /// The log page to read: see [`LogPageId`].
        field log_page / with_log_page: u8 [23:16];
    }
}

impl AsyncEvent {
    /// An event.
    pub const fn new(kind: AsyncEventType, information: u8, page: LogPageId) -> Self {
        Self::from_bits(0).with_kind_bits(kind.0).with_information(information).with_log_page(page.0)
    }

    /// Its type.
    pub const fn kind(self) -> AsyncEventType {
        AsyncEventType(self.kind_bits())
    }
}

open_enum! {
    /// Asynchronous event type (5.2.1, figure 146).
    AsyncEventType(u8) {
        /// Error status; information 0: write to an invalid doorbell, 1: invalid doorbell value, 3: internal
        /// error, 4: transient internal error.
        ERROR = 0,
        /// SMART / Health status.
        SMART = 1,
        /// Notice; information 0: namespace attributes changed.
        NOTICE = 2,
        /// I/O command set specific status.
        COMMAND_SET = 6,
        /// Vendor specific.
        VENDOR = 7,
    }
}
