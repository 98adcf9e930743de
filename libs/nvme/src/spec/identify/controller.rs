//! Identify Controller (5.15.2.2).

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::SIZE;
use crate::spec::bits::{bit_fields, open_enum};
use crate::spec::{SglSupport, Version};

/// Identify Controller data structure, 4096 bytes (5.15.2.2, figure 247).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IdentifyController {
    /// VID: PCI vendor identifier.
    pub vendor: U16,
    /// SSVID: PCI subsystem vendor identifier.
    pub subsystem_vendor: U16,
    /// SN: serial number, ASCII, padded with spaces.
    pub serial: [u8; 20],
    /// MN: model number, ASCII, padded with spaces.
    pub model: [u8; 40],
    /// FR: firmware revision, ASCII, padded with spaces.
    pub firmware: [u8; 8],
    /// RAB: log2 of the recommended arbitration burst.
    pub arbitration_burst: u8,
    /// IEEE: OUI, little-endian.
    pub oui: [u8; 3],
    /// CMIC: multi-path I/O and namespace sharing capabilities.
    pub multi_path: u8,
    /// MDTS: log2 of the largest transfer, in pages of CAP.MPSMIN; 0 is no limit.
    pub max_transfer: u8,
    /// CNTLID: controller identifier.
    pub controller_id: U16,
    /// VER: version.
    pub version: Version,
    /// RTD3R: RTD3 resume latency in µs.
    pub rtd3_resume: U32,
    /// RTD3E: RTD3 entry latency in µs: how long a shutdown may take.
    pub rtd3_entry: U32,
    /// OAES: optional asynchronous events supported.
    pub async_events: OptionalAsyncEvents,
    /// CTRATT: controller attributes.
    pub attributes: ControllerAttributes,
    /// RRLS: read recovery levels supported.
    pub read_recovery_levels: U16,
    /// Reserved.
    pub reserved102: [u8; 9],
    /// CNTRLTYPE: see [`ControllerType`].
    pub controller_type: u8,
    /// FGUID: FRU globally unique identifier.
    pub fru_guid: [u8; 16],
    /// CRDT1 to CRDT3: command retry delays, in units of 100 ms.
    pub retry_delays: [U16; 3],
    /// Reserved.
    pub reserved134: [u8; 106],
    /// Reserved for the NVMe Management Interface.
    pub management: [u8; 16],
    /// OACS: optional admin commands supported.
    pub admin_commands: OptionalAdminCommands,
    /// ACL: concurrent Abort commands less one.
    pub abort_limit: u8,
    /// AERL: concurrent Asynchronous Event Requests less one.
    pub async_event_limit: u8,
    /// FRMW: firmware updates.
    pub firmware_updates: FirmwareUpdates,
    /// LPA: log page attributes.
    pub log_page_attributes: LogPageAttributes,
    /// ELPE: error log page entries less one.
    pub error_log_entries: u8,
    /// NPSS: power states less one.
    pub power_states: u8,
    /// AVSCC: admin vendor specific command configuration.
    pub admin_vendor_configuration: u8,
    /// APSTA: autonomous power state transition attributes.
    pub autonomous_power_state: u8,
    /// WCTEMP: warning composite temperature threshold in kelvin.
    pub warning_temperature: U16,
    /// CCTEMP: critical composite temperature threshold in kelvin.
    pub critical_temperature: U16,
    /// MTFA: maximum time for firmware activation, in units of 100 ms.
    pub firmware_activation_time: U16,
    /// HMPRE: host memory buffer preferred size, in units of 4 KiB.
    pub host_buffer_preferred: U32,
    /// HMMIN: host memory buffer minimum size, in units of 4 KiB.
    pub host_buffer_minimum: U32,
    /// TNVMCAP: total NVM capacity in bytes.
    pub total_capacity: U128,
    /// UNVMCAP: unallocated NVM capacity in bytes.
    pub unallocated_capacity: U128,
    /// RPMBS: replay protected memory block support.
    pub replay_protected_memory: U32,
    /// EDSTT: extended device self-test time in minutes.
    pub self_test_minutes: U16,
    /// DSTO: device self-test options.
    pub self_test_options: u8,
    /// FWUG: firmware update granularity, in units of 4 KiB; ffh is none.
    pub firmware_granularity: u8,
    /// KAS: keep alive granularity, in units of 100 ms; 0 is unsupported.
    pub keep_alive: U16,
    /// HCTMA: host controlled thermal management attributes.
    pub thermal_management: U16,
    /// MNTMT: minimum thermal management temperature in kelvin.
    pub min_thermal_temperature: U16,
    /// MXTMT: maximum thermal management temperature in kelvin.
    pub max_thermal_temperature: U16,
    /// SANICAP: sanitize capabilities.
    pub sanitize: U32,
    /// HMMINDS: host memory buffer minimum descriptor entry size, in units of 4 KiB.
    pub host_buffer_min_descriptor: U32,
    /// HMMAXD: host memory buffer maximum descriptor entries.
    pub host_buffer_max_descriptors: U16,
    /// NSETIDMAX: largest NVM set identifier.
    pub max_nvm_set: U16,
    /// ENDGIDMAX: largest endurance group identifier.
    pub max_endurance_group: U16,
    /// ANATT: ANA transition time in seconds.
    pub ana_transition_time: u8,
    /// ANACAP: ANA capabilities.
    pub ana_capabilities: u8,
    /// ANAGRPMAX: largest ANA group identifier.
    pub max_ana_group: U32,
    /// NANAGRPID: number of ANA groups.
    pub ana_groups: U32,
    /// PELS: persistent event log size, in units of 64 KiB.
    pub persistent_event_log: U32,
    /// Reserved.
    pub reserved356: [u8; 156],
    /// SQES: submission queue entry sizes.
    pub submission_entry: QueueEntrySizes,
    /// CQES: completion queue entry sizes.
    pub completion_entry: QueueEntrySizes,
    /// MAXCMD: maximum outstanding commands; 0 is not said.
    pub max_commands: U16,
    /// NN: the largest namespace identifier.
    pub namespaces: U32,
    /// ONCS: optional NVM commands supported.
    pub nvm_commands: OptionalNvmCommands,
    /// FUSES: fused operations supported.
    pub fused_operations: U16,
    /// FNA: Format NVM attributes.
    pub format_attributes: FormatAttributes,
    /// VWC: volatile write cache.
    pub volatile_write_cache: VolatileWriteCacheSupport,
    /// AWUN: atomic write unit normal, in blocks less one.
    pub atomic_write_normal: U16,
    /// AWUPF: atomic write unit power fail, in blocks less one.
    pub atomic_write_power_fail: U16,
    /// NVSCC: NVM vendor specific command configuration.
    pub nvm_vendor_configuration: u8,
    /// NWPC: namespace write protection capabilities.
    pub write_protection: u8,
    /// ACWU: atomic compare and write unit, in blocks less one.
    pub atomic_compare_write: U16,
    /// Reserved.
    pub reserved534: [u8; 2],
    /// SGLS: SGL support.
    pub sgl_support: SglSupport,
    /// MNAN: maximum number of allowed namespaces; 0 is NN.
    pub max_namespaces: U32,
    /// Reserved.
    pub reserved544: [u8; 224],
    /// SUBNQN: NVM subsystem qualified name, UTF-8, terminated by a zero.
    pub subsystem_name: [u8; 256],
    /// Reserved.
    pub reserved1024: [u8; 768],
    /// NVMe over Fabrics.
    pub fabrics: [u8; 256],
    /// PSD0 to PSD31: power state descriptors.
    pub power_state: [PowerStateDescriptor; 32],
    /// Vendor specific.
    pub vendor_specific: [u8; 1024],
}

impl IdentifyController {
    /// All zeroes: nothing is supported.
    pub fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

const _: () = {
    assert!(size_of::<IdentifyController>() == SIZE);
    assert!(offset_of!(IdentifyController, max_transfer) == 77);
    assert!(offset_of!(IdentifyController, controller_type) == 111);
    assert!(offset_of!(IdentifyController, retry_delays) == 128);
    assert!(offset_of!(IdentifyController, admin_commands) == 256);
    assert!(offset_of!(IdentifyController, total_capacity) == 280);
    assert!(offset_of!(IdentifyController, sanitize) == 328);
    assert!(offset_of!(IdentifyController, max_ana_group) == 344);
    assert!(offset_of!(IdentifyController, submission_entry) == 512);
    assert!(offset_of!(IdentifyController, nvm_commands) == 520);
    assert!(offset_of!(IdentifyController, sgl_support) == 536);
    assert!(offset_of!(IdentifyController, subsystem_name) == 768);
    assert!(offset_of!(IdentifyController, fabrics) == 1792);
    assert!(offset_of!(IdentifyController, power_state) == 2048);
    assert!(offset_of!(IdentifyController, vendor_specific) == 3072);
};

open_enum! {
    /// CNTRLTYPE (figure 247).
    ControllerType(u8) {
        /// Not reported.
        UNREPORTED = 0,
        /// I/O controller.
        IO = 1,
        /// Discovery controller.
        DISCOVERY = 2,
        /// Administrative controller.
        ADMINISTRATIVE = 3,
    }
}

bit_fields! {
    /// OAES (figure 247).
    OptionalAsyncEvents(u32) {
        /// Namespace Attribute Notices.
        flag namespace_attributes / with_namespace_attributes [8];
        /// Firmware Activation Notices.
        flag firmware_activation / with_firmware_activation [9];
        /// Asymmetric Namespace Access Change Notices.
        flag ana_change / with_ana_change [11];
        /// Predictable Latency Event Aggregate Log Change Notices.
        flag predictable_latency / with_predictable_latency [12];
        /// LBA Status Information Notices.
        flag lba_status / with_lba_status [13];
        /// Endurance Group Event Aggregate Log Page Change Notices.
        flag endurance_group / with_endurance_group [14];
    }
}

bit_fields! {
    /// CTRATT (figure 247).
    ControllerAttributes(u32) {
        /// A 128-bit host identifier is supported.
        flag host_id_128 / with_host_id_128 [0];
        /// Non-operational power state permissive mode.
        flag non_operational_permissive / with_non_operational_permissive [1];
        /// NVM sets.
        flag nvm_sets / with_nvm_sets [2];
        /// Read recovery levels.
        flag read_recovery_levels / with_read_recovery_levels [3];
        /// Endurance groups.
        flag endurance_groups / with_endurance_groups [4];
        /// Predictable latency mode.
        flag predictable_latency / with_predictable_latency [5];
        /// Traffic based keep alive.
        flag traffic_keep_alive / with_traffic_keep_alive [6];
        /// Namespace granularity.
        flag namespace_granularity / with_namespace_granularity [7];
        /// SQ associations.
        flag queue_associations / with_queue_associations [8];
        /// UUID list.
        flag uuid_list / with_uuid_list [9];
    }
}

bit_fields! {
    /// OACS (figure 247).
    OptionalAdminCommands(u16) {
        /// Security Send and Receive.
        flag security / with_security [0];
        /// Format NVM.
        flag format / with_format [1];
        /// Firmware Commit and Image Download.
        flag firmware / with_firmware [2];
        /// Namespace Management and Attachment.
        flag namespace_management / with_namespace_management [3];
        /// Device Self-test.
        flag self_test / with_self_test [4];
        /// Directives.
        flag directives / with_directives [5];
        /// NVMe-MI Send and Receive.
        flag management_interface / with_management_interface [6];
        /// Virtualization Management.
        flag virtualization / with_virtualization [7];
        /// Doorbell Buffer Config.
        flag doorbell_buffer / with_doorbell_buffer [8];
        /// Get LBA Status.
        flag lba_status / with_lba_status [9];
    }
}

bit_fields! {
    /// FRMW (figure 247).
    FirmwareUpdates(u8) {
        /// Slot 1 is read only.
        flag slot1_read_only / with_slot1_read_only [0];
        /// Slots, 1-7.
        field slots / with_slots: u8 [3:1];
        /// Activation needs no reset.
        flag without_reset / with_without_reset [4];
    }
}

bit_fields! {
    /// LPA (figure 247).
    LogPageAttributes(u8) {
        /// SMART log per namespace.
        flag smart_per_namespace / with_smart_per_namespace [0];
        /// Commands Supported and Effects log.
        flag commands_supported / with_commands_supported [1];
        /// Extended data: 32-bit lengths and offsets in Get Log Page.
        flag extended_data / with_extended_data [2];
        /// Telemetry logs and notices.
        flag telemetry / with_telemetry [3];
        /// Persistent event log.
        flag persistent_event / with_persistent_event [4];
    }
}

bit_fields! {
    /// SQES and CQES (figure 247).
    QueueEntrySizes(u8) {
        /// log2 of the required size.
        field required / with_required: u8 [3:0];
        /// log2 of the largest size.
        field maximum / with_maximum: u8 [7:4];
    }
}

bit_fields! {
    /// ONCS (figure 247).
    OptionalNvmCommands(u16) {
        /// Compare.
        flag compare / with_compare [0];
        /// Write Uncorrectable.
        flag write_uncorrectable / with_write_uncorrectable [1];
        /// Dataset Management.
        flag dataset_management / with_dataset_management [2];
        /// Write Zeroes.
        flag write_zeroes / with_write_zeroes [3];
        /// Save in Set Features, Select in Get Features.
        flag feature_select / with_feature_select [4];
        /// Reservations.
        flag reservations / with_reservations [5];
        /// Timestamp.
        flag timestamp / with_timestamp [6];
        /// Verify.
        flag verify / with_verify [7];
    }
}

bit_fields! {
    /// FNA (figure 247).
    FormatAttributes(u8) {
        /// A format is one of all namespaces.
        flag format_all / with_format_all [0];
        /// A secure erase is one of all namespaces.
        flag erase_all / with_erase_all [1];
        /// Cryptographic erase.
        flag cryptographic / with_cryptographic [2];
    }
}

bit_fields! {
    /// VWC (figure 247).
    VolatileWriteCacheSupport(u8) {
        /// A volatile write cache is present.
        flag present / with_present [0];
        /// Flush of all namespaces: 0 not said, 2 unsupported, 3 supported.
        field flush_all / with_flush_all: u8 [2:1];
    }
}

/// Power state descriptor, 32 bytes (figure 248).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PowerStateDescriptor {
    /// MP: maximum power, in units of 0.01 W or by [`PowerStateFlags::max_power_scale`].
    pub max_power: U16,
    /// Reserved.
    pub reserved2: u8,
    /// MXPS and NOPS.
    pub flags: PowerStateFlags,
    /// ENLAT: entry latency in µs.
    pub entry_latency: U32,
    /// EXLAT: exit latency in µs.
    pub exit_latency: U32,
    /// RRT: relative read throughput, 0 is best.
    pub read_throughput: u8,
    /// RRL: relative read latency, 0 is best.
    pub read_latency: u8,
    /// RWT: relative write throughput, 0 is best.
    pub write_throughput: u8,
    /// RWL: relative write latency, 0 is best.
    pub write_latency: u8,
    /// IDLP: idle power.
    pub idle_power: U16,
    /// IPS: idle power scale, in bits 7:6.
    pub idle_power_scale: u8,
    /// Reserved.
    pub reserved19: u8,
    /// ACTP: active power.
    pub active_power: U16,
    /// APW and APS: active power workload in bits 2:0, scale in bits 7:6.
    pub active_power_scale: u8,
    /// Reserved.
    pub reserved23: [u8; 9],
}

const _: () = {
    assert!(size_of::<PowerStateDescriptor>() == 32);
    assert!(offset_of!(PowerStateDescriptor, idle_power) == 16);
};

bit_fields! {
    /// Byte 3 of a power state descriptor (figure 248).
    PowerStateFlags(u8) {
        /// MXPS: the maximum power is in units of 0.0001 W.
        flag max_power_scale / with_max_power_scale [0];
        /// NOPS: no I/O is processed in this state.
        flag non_operational / with_non_operational [1];
    }
}
