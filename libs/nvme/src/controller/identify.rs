//! What Identify returns (Base Specification 1.4, section 5.15.2).

use zerocopy::IntoBytes;

use super::Options;
use super::disk::Geometry;
use super::health::{CRITICAL_TEMPERATURE, WARNING_TEMPERATURE};
use super::limits::{BATCH, ERROR_LOG_ENTRIES, MAX_PARKED_EVENTS};
use crate::Nsid;
use crate::spec::{
    ControllerAttributes, ControllerType, DeallocateFeatures, FirmwareUpdates, FormattedLbaSize,
    IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, LbaFormat, LogPageAttributes,
    NamespaceIdDescriptor, NamespaceIdType, OptionalAdminCommands, OptionalAsyncEvents, OptionalNvmCommands,
    PowerStateDescriptor, QueueEntrySizes, SglSupport, Version, VolatileWriteCacheSupport,
};

/// NIDL of a UUID.
const UUID_SIZE: u8 = 16;

/// NSATTR: the namespace is write protected.
const WRITE_PROTECTED: u8 = 1;

/// Copies ASCII into a field, padded with spaces.
fn fill(field: &mut [u8], text: &str) {
    field.fill(b' ');
    for (byte, value) in field.iter_mut().zip(text.bytes()) {
        *byte = value;
    }
}

/// The Identify Controller data.
pub(super) fn controller(options: &Options, geometries: &[Geometry]) -> IdentifyController {
    let mut data = IdentifyController::zeroed();
    data.vendor = options.vendor.into();
    data.subsystem_vendor = options.vendor.into();
    fill(&mut data.serial, &options.serial);
    fill(&mut data.model, &options.model);
    fill(&mut data.firmware, &options.firmware);
    data.max_transfer = options.max_transfer_shift;
    data.version = Version::V1_4;
    data.controller_type = ControllerType::IO.0;
    // What a poll takes from a queue.
    data.arbitration_burst = BATCH.ilog2().try_into().unwrap_or(0);
    data.attributes = ControllerAttributes::default().with_host_id_128(true);
    data.admin_commands =
        OptionalAdminCommands::default().with_format(true).with_doorbell_buffer(options.shadow_doorbells);
    data.async_events = OptionalAsyncEvents::default().with_namespace_attributes(true);
    data.abort_limit = 3;
    data.async_event_limit = MAX_PARKED_EVENTS - 1;
    data.firmware_updates = FirmwareUpdates::default().with_slot1_read_only(true).with_slots(1);
    data.log_page_attributes =
        LogPageAttributes::default().with_extended_data(true).with_commands_supported(true);
    data.error_log_entries = ERROR_LOG_ENTRIES - 1;
    data.warning_temperature = WARNING_TEMPERATURE.into();
    data.critical_temperature = CRITICAL_TEMPERATURE.into();
    data.submission_entry = QueueEntrySizes::default().with_required(6).with_maximum(6);
    data.completion_entry = QueueEntrySizes::default().with_required(4).with_maximum(4);
    data.namespaces = u32::try_from(geometries.len()).unwrap_or(u32::MAX).into();
    data.nvm_commands = OptionalNvmCommands::default()
        .with_compare(true)
        .with_write_uncorrectable(true)
        .with_verify(true)
        .with_dataset_management(geometries.iter().any(|geometry| geometry.deallocates))
        .with_write_zeroes(true)
        .with_feature_select(true)
        .with_timestamp(true);
    data.volatile_write_cache = VolatileWriteCacheSupport::default()
        .with_present(geometries.iter().any(|geometry| geometry.volatile_cache))
        .with_flush_all(3);
    data.sgl_support = SglSupport::default()
        .with_support(1)
        .with_bit_bucket(true)
        .with_byte_metadata(true)
        .with_excess_length(true)
        .with_metadata_sgl(true);
    let name = format!("nqn.2014-08.org.nvmexpress:uuid:{}", Uuid::of(&options.serial, Nsid(0)));
    for (byte, value) in data.subsystem_name.iter_mut().zip(name.bytes()) {
        *byte = value;
    }
    // 25 W, in hundredths.
    data.power_state[0] = PowerStateDescriptor { max_power: 2500.into(), ..PowerStateDescriptor::default() };
    data
}

/// The Identify Namespace data of a namespace that exists.
pub(super) fn namespace(geometry: &Geometry) -> IdentifyNamespace {
    let mut data = IdentifyNamespace::zeroed();
    data.size = geometry.blocks.into();
    data.capacity = geometry.blocks.into();
    data.utilization = geometry.blocks.into();
    data.deallocate = DeallocateFeatures::default()
        .with_reads_as(u8::from(geometry.deallocates))
        .with_write_zeroes(geometry.deallocates);
    if geometry.read_only {
        data.attributes = WRITE_PROTECTED;
    }
    data.nvm_capacity = (u128::from(geometry.blocks) << geometry.block_shift.min(63)).into();
    for (format, shift) in data.lba_formats.iter_mut().zip(geometry.formats) {
        *format = LbaFormat::default().with_data_shift((shift & 0xff) as u8);
    }
    // At most 16.
    data.formats = u8::try_from(geometry.formats.len().saturating_sub(1)).unwrap_or(0xf);
    let index = geometry.formats.iter().position(|shift| *shift == geometry.block_shift).unwrap_or(0);
    data.formatted = FormattedLbaSize::default().with_index(u8::try_from(index).unwrap_or(0));
    data
}

/// Namespaces above `above`, which count from 1 to `count` (CNS 02h, 10h).
pub(super) fn namespaces(above: Nsid, count: usize) -> [u8; IDENTIFY_SIZE] {
    let mut data = [0; IDENTIFY_SIZE];
    let last = u32::try_from(count).unwrap_or(u32::MAX);
    let active = above.0.saturating_add(1)..=last;
    for (place, nsid) in data.as_chunks_mut().0.iter_mut().zip(active) {
        *place = nsid.to_le_bytes();
    }
    data
}

/// Namespace Identification Descriptors (CNS 03h): a UUID.
pub(super) fn descriptors(serial: &str, nsid: Nsid) -> [u8; IDENTIFY_SIZE] {
    let mut data = [0; IDENTIFY_SIZE];
    let uuid = Uuid::of(serial, nsid).0;
    let header = NamespaceIdDescriptor { kind: NamespaceIdType::UUID.0, length: UUID_SIZE, reserved: [0; 2] };
    for (byte, value) in data.iter_mut().zip(header.as_bytes().iter().chain(&uuid)) {
        *byte = *value;
    }
    data
}

/// A UUID of version 8 (RFC 9562), the same for the same drive and namespace in every run.
struct Uuid([u8; 16]);

impl Uuid {
    /// Of the FNV-1a hash of the serial number and the namespace.
    fn of(serial: &str, nsid: Nsid) -> Self {
        let hash = serial
            .bytes()
            .chain(nsid.0.to_le_bytes())
            .fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
                (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
            });
        let version = 8_u128 << 76;
        let variant = 0b10_u128 << 62;
        Self(((hash & !(0xf << 76) & !(0b11 << 62)) | version | variant).to_be_bytes())
    }
}

impl std::fmt::Display for Uuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}
