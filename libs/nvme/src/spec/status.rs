//! Completion status (4.6.1).

use super::bits::{bit_fields, low, open_enum};

bit_fields! {
    /// The last word of a completion: the phase tag, then the status field (4.6, 4.6.1).
    StatusField(u16) {
        /// P: inverted in each pass over the completion queue.
        flag phase / with_phase [0];
        /// SC and SCT as one number: see [`Status`].
        field code / with_code: u16 [11:1];
        /// CRD: which of the controller's three retry delays applies; 0 is none.
        field retry_delay / with_retry_delay: u8 [13:12];
        /// M: the error log tells more.
        flag more / with_more [14];
        /// DNR: the same command would fail again.
        flag do_not_retry / with_do_not_retry [15];
    }
}

impl StatusField {
    /// A status without its flags and with phase 0.
    pub const fn new(status: Status) -> Self {
        Self::from_bits(0).with_code(status.0)
    }

    /// The status code and its type.
    pub const fn status(self) -> Status {
        Status(self.code())
    }
}

open_enum! {
    /// SCT: status code type (4.6.1.1).
    StatusType(u8) {
        /// Any command.
        GENERIC = 0,
        /// The command's own.
        COMMAND_SPECIFIC = 1,
        /// Media and data integrity.
        MEDIA = 2,
        /// Path related.
        PATH = 3,
        /// Vendor specific.
        VENDOR = 7,
    }
}

impl Status {
    /// From a code and its type.
    pub const fn from_parts(kind: StatusType, code: u8) -> Self {
        Self((kind.0 as u16 & 7) << 8 | code as u16)
    }

    /// SCT.
    pub const fn kind(self) -> StatusType {
        StatusType(low::u8(self.0 as u64 >> 8) & 7)
    }

    /// SC.
    pub const fn code(self) -> u8 {
        low::u8(self.0 as u64)
    }

    /// Whether the command was successful.
    pub const fn is_success(self) -> bool {
        self.0 == Self::SUCCESS.0
    }
}

open_enum! {
    /// A status code with its type: `type << 8 | code` (4.6.1.2).
    Status(u16) {
        /// Successful Completion.
        SUCCESS = 0x000,
        /// Invalid Command Opcode.
        INVALID_OPCODE = 0x001,
        /// Invalid Field in Command.
        INVALID_FIELD = 0x002,
        /// Command ID Conflict.
        COMMAND_ID_CONFLICT = 0x003,
        /// Data Transfer Error.
        DATA_TRANSFER_ERROR = 0x004,
        /// Commands Aborted due to Power Loss Notification.
        ABORTED_POWER_LOSS = 0x005,
        /// Internal Error.
        INTERNAL_ERROR = 0x006,
        /// Command Abort Requested.
        ABORT_REQUESTED = 0x007,
        /// Command Aborted due to SQ Deletion.
        ABORTED_SQ_DELETION = 0x008,
        /// Command Aborted due to Failed Fused Command.
        ABORTED_FAILED_FUSED = 0x009,
        /// Command Aborted due to Missing Fused Command.
        ABORTED_MISSING_FUSED = 0x00a,
        /// Invalid Namespace or Format.
        INVALID_NAMESPACE = 0x00b,
        /// Command Sequence Error.
        COMMAND_SEQUENCE_ERROR = 0x00c,
        /// Invalid SGL Segment Descriptor.
        INVALID_SGL_SEGMENT = 0x00d,
        /// Invalid Number of SGL Descriptors.
        INVALID_SGL_COUNT = 0x00e,
        /// Data SGL Length Invalid.
        INVALID_SGL_LENGTH = 0x00f,
        /// Metadata SGL Length Invalid.
        INVALID_METADATA_SGL_LENGTH = 0x010,
        /// SGL Descriptor Type Invalid.
        INVALID_SGL_TYPE = 0x011,
        /// Invalid Use of Controller Memory Buffer.
        INVALID_CMB_USE = 0x012,
        /// PRP Offset Invalid.
        INVALID_PRP_OFFSET = 0x013,
        /// Atomic Write Unit Exceeded.
        ATOMIC_WRITE_UNIT_EXCEEDED = 0x014,
        /// Operation Denied.
        OPERATION_DENIED = 0x015,
        /// SGL Offset Invalid.
        INVALID_SGL_OFFSET = 0x016,
        /// Host Identifier Inconsistent Format.
        HOST_ID_INCONSISTENT = 0x018,
        /// Keep Alive Timer Expired.
        KEEP_ALIVE_EXPIRED = 0x019,
        /// Keep Alive Timeout Invalid.
        KEEP_ALIVE_INVALID = 0x01a,
        /// Command Aborted due to Preempt and Abort.
        ABORTED_PREEMPT = 0x01b,
        /// Sanitize Failed.
        SANITIZE_FAILED = 0x01c,
        /// Sanitize In Progress.
        SANITIZE_IN_PROGRESS = 0x01d,
        /// SGL Data Block Granularity Invalid.
        INVALID_SGL_GRANULARITY = 0x01e,
        /// Command Not Supported for Queue in CMB.
        NOT_SUPPORTED_IN_CMB = 0x01f,
        /// Namespace is Write Protected.
        WRITE_PROTECTED = 0x020,
        /// Command Interrupted.
        COMMAND_INTERRUPTED = 0x021,
        /// Transient Transport Error.
        TRANSIENT_TRANSPORT_ERROR = 0x022,
        /// LBA Out of Range.
        LBA_OUT_OF_RANGE = 0x080,
        /// Capacity Exceeded.
        CAPACITY_EXCEEDED = 0x081,
        /// Namespace Not Ready.
        NAMESPACE_NOT_READY = 0x082,
        /// Reservation Conflict.
        RESERVATION_CONFLICT = 0x083,
        /// Format In Progress.
        FORMAT_IN_PROGRESS = 0x084,

        /// Completion Queue Invalid.
        INVALID_COMPLETION_QUEUE = 0x100,
        /// Invalid Queue Identifier.
        INVALID_QUEUE_ID = 0x101,
        /// Invalid Queue Size.
        INVALID_QUEUE_SIZE = 0x102,
        /// Abort Command Limit Exceeded.
        ABORT_LIMIT_EXCEEDED = 0x103,
        /// Asynchronous Event Request Limit Exceeded.
        ASYNC_EVENT_LIMIT_EXCEEDED = 0x105,
        /// Invalid Firmware Slot.
        INVALID_FIRMWARE_SLOT = 0x106,
        /// Invalid Firmware Image.
        INVALID_FIRMWARE_IMAGE = 0x107,
        /// Invalid Interrupt Vector.
        INVALID_INTERRUPT_VECTOR = 0x108,
        /// Invalid Log Page.
        INVALID_LOG_PAGE = 0x109,
        /// Invalid Format.
        INVALID_FORMAT = 0x10a,
        /// Firmware Activation Requires Conventional Reset.
        FIRMWARE_NEEDS_CONVENTIONAL_RESET = 0x10b,
        /// Invalid Queue Deletion.
        INVALID_QUEUE_DELETION = 0x10c,
        /// Feature Identifier Not Saveable.
        FEATURE_NOT_SAVEABLE = 0x10d,
        /// Feature Not Changeable.
        FEATURE_NOT_CHANGEABLE = 0x10e,
        /// Feature Not Namespace Specific.
        FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10f,
        /// Firmware Activation Requires NVM Subsystem Reset.
        FIRMWARE_NEEDS_SUBSYSTEM_RESET = 0x110,
        /// Firmware Activation Requires Controller Level Reset.
        FIRMWARE_NEEDS_CONTROLLER_RESET = 0x111,
        /// Firmware Activation Requires Maximum Time Violation.
        FIRMWARE_NEEDS_TIME_VIOLATION = 0x112,
        /// Firmware Activation Prohibited.
        FIRMWARE_ACTIVATION_PROHIBITED = 0x113,
        /// Overlapping Range.
        OVERLAPPING_RANGE = 0x114,
        /// Namespace Insufficient Capacity.
        NAMESPACE_INSUFFICIENT_CAPACITY = 0x115,
        /// Namespace Identifier Unavailable.
        NAMESPACE_ID_UNAVAILABLE = 0x116,
        /// Namespace Already Attached.
        NAMESPACE_ALREADY_ATTACHED = 0x118,
        /// Namespace Is Private.
        NAMESPACE_PRIVATE = 0x119,
        /// Namespace Not Attached.
        NAMESPACE_NOT_ATTACHED = 0x11a,
        /// Thin Provisioning Not Supported.
        THIN_PROVISIONING_UNSUPPORTED = 0x11b,
        /// Controller List Invalid.
        INVALID_CONTROLLER_LIST = 0x11c,
        /// Device Self-test In Progress.
        SELF_TEST_IN_PROGRESS = 0x11d,
        /// Boot Partition Write Prohibited.
        BOOT_PARTITION_WRITE_PROHIBITED = 0x11e,
        /// Invalid Controller Identifier.
        INVALID_CONTROLLER_ID = 0x11f,
        /// Invalid Secondary Controller State.
        INVALID_SECONDARY_STATE = 0x120,
        /// Invalid Number of Controller Resources.
        INVALID_RESOURCE_COUNT = 0x121,
        /// Invalid Resource Identifier.
        INVALID_RESOURCE_ID = 0x122,
        /// Sanitize Prohibited While Persistent Memory Region is Enabled.
        SANITIZE_PROHIBITED = 0x123,
        /// ANA Group Identifier Invalid.
        INVALID_ANA_GROUP = 0x124,
        /// ANA Attach Failed.
        ANA_ATTACH_FAILED = 0x125,
        /// Conflicting Attributes.
        CONFLICTING_ATTRIBUTES = 0x180,
        /// Invalid Protection Information.
        INVALID_PROTECTION_INFORMATION = 0x181,
        /// Attempted Write to Read Only Range.
        WRITE_TO_READ_ONLY_RANGE = 0x182,

        /// Write Fault.
        WRITE_FAULT = 0x280,
        /// Unrecovered Read Error.
        UNRECOVERED_READ_ERROR = 0x281,
        /// End-to-end Guard Check Error.
        GUARD_CHECK_ERROR = 0x282,
        /// End-to-end Application Tag Check Error.
        APPLICATION_TAG_ERROR = 0x283,
        /// End-to-end Reference Tag Check Error.
        REFERENCE_TAG_ERROR = 0x284,
        /// Compare Failure.
        COMPARE_FAILURE = 0x285,
        /// Access Denied.
        ACCESS_DENIED = 0x286,
        /// Deallocated or Unwritten Logical Block.
        DEALLOCATED_BLOCK = 0x287,

        /// Internal Path Error.
        INTERNAL_PATH_ERROR = 0x300,
        /// Asymmetric Access Persistent Loss.
        ANA_PERSISTENT_LOSS = 0x301,
        /// Asymmetric Access Inaccessible.
        ANA_INACCESSIBLE = 0x302,
        /// Asymmetric Access Transition.
        ANA_TRANSITION = 0x303,
        /// Controller Pathing Error.
        CONTROLLER_PATHING_ERROR = 0x360,
        /// Host Pathing Error.
        HOST_PATHING_ERROR = 0x370,
        /// Command Aborted By Host.
        ABORTED_BY_HOST = 0x371,
    }
}
