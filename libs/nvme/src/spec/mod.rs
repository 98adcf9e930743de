//! The structures and numbers of the NVM Express Base Specification, revision 1.4. No behaviour.
//!
//! Structures are little-endian and may be read from any bytes of their size: a value that the specification
//! does not name survives. Section numbers are those of revision 1.4.

mod bits;
mod command;
mod feature;
mod identify;
mod log;
mod opcode;
mod queue;
mod registers;
mod sgl;
mod status;

#[cfg(test)]
mod tests;

pub use command::{
    Abort, CreateCompletionQueue, CreateQueue, CreateSubmissionQueue, DataPointerType, DsmAttributes,
    DsmCount, DsmRange, EntryFlags, FormatNvm, GetFeatures, GetLogPage10, GetLogPage11, Identify10,
    ReadWrite12, SecureErase, SetFeatures,
};
pub use feature::{
    Arbitration, AsyncEventConfiguration, ErrorRecovery, FeatureCapabilities, FeatureId, FeatureSelect,
    HostIdentifierSize, InterruptCoalescing, InterruptVectorConfiguration, LbaRangeAttributes, LbaRangeType,
    NumberOfQueues, PowerManagement, TemperatureThreshold, VolatileWriteCache, WriteAtomicity,
};
pub use identify::{
    Cns, ControllerAttributes, ControllerType, DeallocateFeatures, FirmwareUpdates, FormatAttributes,
    FormattedLbaSize, IdentifyController, IdentifyNamespace, LbaFormat, LogPageAttributes, NamespaceFeatures,
    NamespaceIdDescriptor, NamespaceIdType, OptionalAdminCommands, OptionalAsyncEvents, OptionalNvmCommands,
    PowerStateDescriptor, PowerStateFlags, QueueEntrySizes, SIZE as IDENTIFY_SIZE, VolatileWriteCacheSupport,
};
pub use log::{
    AsyncEvent, AsyncEventType, CommandEffects, CommandsSupportedLog, CriticalWarning, ErrorLogEntry,
    FirmwareSlotInfo, FirmwareSlotLog, LogPageId, ParameterErrorLocation, SmartLog,
};
pub use opcode::{AdminOpcode, NvmOpcode};
pub use queue::{CompletionEntry, SubmissionEntry};
pub use registers::{
    AdminQueueAttributes, Capabilities, Configuration, ControllerStatus, DOORBELLS, Register,
    ShutdownNotification, ShutdownStatus, Version, doorbell_index, doorbell_offset,
};
pub use sgl::{SglDescriptor, SglIdentifier, SglSubtype, SglSupport, SglType};
pub use status::{Status, StatusField, StatusType};

/// "All namespaces" where a command takes a namespace identifier (6.1.2).
pub const NSID_ALL: crate::Nsid = crate::Nsid(0xffff_ffff);
