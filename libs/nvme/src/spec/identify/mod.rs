//! Identify data (5.15.2).

mod controller;
mod namespace;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::bits::open_enum;

pub use controller::{
    ControllerAttributes, ControllerType, FirmwareUpdates, FormatAttributes, IdentifyController,
    LogPageAttributes, OptionalAdminCommands, OptionalAsyncEvents, OptionalNvmCommands, PowerStateDescriptor,
    PowerStateFlags, QueueEntrySizes, VolatileWriteCacheSupport,
};
pub use namespace::{DeallocateFeatures, FormattedLbaSize, IdentifyNamespace, LbaFormat, NamespaceFeatures};

/// Bytes of every Identify data structure.
pub const SIZE: usize = 4096;

open_enum! {
    /// CNS: what Identify returns (5.15.1, figure 244).
    Cns(u8) {
        /// [`IdentifyNamespace`] of a namespace.
        NAMESPACE = 0x00,
        /// [`IdentifyController`].
        CONTROLLER = 0x01,
        /// Up to 1024 active namespace identifiers above NSID.
        ACTIVE_NAMESPACES = 0x02,
        /// [`NamespaceIdDescriptor`]s of a namespace.
        NAMESPACE_ID_DESCRIPTORS = 0x03,
        /// NVM Set List.
        NVM_SETS = 0x04,
        /// I/O command set specific Identify Namespace (2.0).
        COMMAND_SET_NAMESPACE = 0x05,
        /// I/O command set specific Identify Controller (2.0).
        COMMAND_SET_CONTROLLER = 0x06,
        /// Up to 1024 allocated namespace identifiers above NSID.
        ALLOCATED_NAMESPACES = 0x10,
        /// [`IdentifyNamespace`] of an allocated namespace.
        ALLOCATED_NAMESPACE = 0x11,
        /// Controllers that a namespace is attached to.
        ATTACHED_CONTROLLERS = 0x12,
        /// Controllers of the subsystem.
        CONTROLLERS = 0x13,
        /// Primary Controller Capabilities.
        PRIMARY_CAPABILITIES = 0x14,
        /// Secondary Controller List.
        SECONDARY_CONTROLLERS = 0x15,
        /// Namespace Granularity List.
        NAMESPACE_GRANULARITY = 0x16,
        /// UUID List.
        UUIDS = 0x17,
    }
}

/// The header of a namespace identification descriptor; `length` bytes of identifier follow (5.15.2.3,
/// figure 249). A header of zeroes ends the list.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NamespaceIdDescriptor {
    /// NIDT: see [`NamespaceIdType`].
    pub kind: u8,
    /// NIDL: bytes of the identifier.
    pub length: u8,
    /// Reserved.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<NamespaceIdDescriptor>() == 4);

open_enum! {
    /// NIDT: namespace identifier type (figure 249).
    NamespaceIdType(u8) {
        /// EUI64, 8 bytes.
        EUI64 = 1,
        /// NGUID, 16 bytes.
        NGUID = 2,
        /// UUID, 16 bytes.
        UUID = 3,
    }
}
