//! Features (Base Specification 1.4, sections 5.9, 5.21 and 7.8). None can be saved: the drive has no memory of
//! its own, so each begins with its default after every reset.

use std::time::Duration;

use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::Geometry;
use super::completion::Failure;
use super::health::{TEMPERATURE, WARNING_TEMPERATURE};
use super::timestamp::Timestamp;
use crate::Nsid;
use crate::spec::{
    Arbitration, AsyncEventConfiguration, CriticalWarning, ErrorRecovery, FeatureCapabilities, FeatureId,
    FeatureSelect, HostIdentifierSize, InterruptCoalescing, InterruptVectorConfiguration, LbaRangeAttributes,
    LbaRangeType, NSID_ALL, NumberOfQueues, PowerManagement, Status, TemperatureThreshold,
    VolatileWriteCache, WriteAtomicity,
};

/// What the features are about: it does not change.
#[derive(Clone, Copy, Debug)]
pub(super) struct FeatureLimits {
    /// I/O queue pairs.
    pub(super) pairs: u16,
    /// Interrupt vectors.
    pub(super) vectors: u16,
    /// Some disk has a volatile write cache.
    pub(super) cache: bool,
    pub(super) namespaces: usize,
}

/// The values.
#[derive(Clone, Debug)]
pub(super) struct Features {
    limits: FeatureLimits,
    values: Values,
    defaults: Values,
}

#[derive(Clone, Debug)]
struct Values {
    arbitration: u32,
    power: u32,
    over_temperature: u16,
    under_temperature: u16,
    /// By namespace.
    error_recovery: Vec<u32>,
    write_cache: bool,
    coalescing: InterruptCoalescing,
    /// By vector: coalescing is off for it.
    coalescing_disabled: Vec<bool>,
    write_atomicity: u32,
    async_events: AsyncEventConfiguration,
    timestamp: Timestamp,
    host: HostIdentifier,
}

/// As long as the host gave it.
#[derive(Clone, Copy, Debug, Default)]
struct HostIdentifier([u8; 16]);

/// What Get Features answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Value {
    /// Dword 0 of the completion.
    pub(super) result: u32,
    /// What goes to the host's memory; most features have none.
    pub(super) data: Vec<u8>,
}

impl From<u32> for Value {
    fn from(result: u32) -> Self {
        Self { result, data: Vec::new() }
    }
}

/// The data of Set Features, as far as its length says.
pub(super) type Data = [u8; 16];

/// How completions are gathered before an interrupt (5.21.1.8).
#[derive(Clone, Copy, Debug)]
pub(super) struct Coalescing<'a> {
    /// So many completions are worth an interrupt.
    pub(super) completions: u32,
    /// So long the first of them may wait.
    pub(super) time: Duration,
    disabled: &'a [bool],
}

impl Coalescing<'_> {
    /// Whether completions for this vector are gathered.
    pub(super) fn covers(&self, vector: u16) -> bool {
        self.disabled.get(usize::from(vector)) == Some(&false)
    }
}

/// TMPSEL: the composite temperature, and all temperatures.
const COMPOSITE: u8 = 0;
const ALL_SENSORS: u8 = 15;

// Where parameters lie in the command, for the error log.
const DWORD11: u8 = 44;
const SELECT: u8 = 41;

const fn invalid(byte: u8, bit: u8) -> Failure {
    Failure::at(Status::INVALID_FIELD, byte, bit)
}

impl Features {
    pub(super) fn new(limits: FeatureLimits) -> Self {
        let values = Values {
            // No limit to a burst.
            arbitration: Arbitration::default().with_burst(7).bits(),
            power: 0,
            over_temperature: WARNING_TEMPERATURE,
            under_temperature: 0,
            error_recovery: vec![0; limits.namespaces],
            write_cache: limits.cache,
            coalescing: InterruptCoalescing::default(),
            coalescing_disabled: vec![false; usize::from(limits.vectors)],
            write_atomicity: 0,
            async_events: AsyncEventConfiguration::default(),
            timestamp: Timestamp::new(),
            host: HostIdentifier::default(),
        };
        Self { limits, defaults: values.clone(), values }
    }

    /// A reset.
    pub(super) fn reset(&mut self) {
        self.values.clone_from(&self.defaults);
        self.values.timestamp = Timestamp::new();
    }

    /// Whether writes may complete before they are durable.
    #[inline]
    pub(super) fn write_cache(&self) -> bool {
        self.values.write_cache
    }

    /// The most commands that are taken from a queue at once; none is no limit.
    #[inline]
    pub(super) fn burst(&self) -> Option<usize> {
        match Arbitration::from_bits(self.values.arbitration).burst() {
            7 => None,
            burst => Some(1 << burst),
        }
    }

    /// How interrupts are coalesced, if they are.
    #[inline]
    pub(super) fn coalescing(&self) -> Option<Coalescing<'_>> {
        let asked = self.values.coalescing;
        if asked.threshold() == 0 || asked.time() == 0 {
            return None;
        }
        Some(Coalescing {
            completions: u32::from(asked.threshold()).saturating_add(1),
            time: Duration::from_micros(u64::from(asked.time()).saturating_mul(100)),
            disabled: &self.values.coalescing_disabled,
        })
    }

    /// What is wrong with the drive (5.14.1.2).
    pub(super) fn warnings(&self) -> CriticalWarning {
        let beyond =
            TEMPERATURE >= self.values.over_temperature || TEMPERATURE <= self.values.under_temperature;
        CriticalWarning::default().with_temperature(beyond)
    }

    /// What the host wants to hear of.
    pub(super) fn async_events(&self) -> AsyncEventConfiguration {
        self.values.async_events
    }

    /// What can be done with a feature; none when it does not exist.
    fn capabilities(&self, feature: FeatureId) -> Result<FeatureCapabilities, Failure> {
        let changeable = FeatureCapabilities::default().with_changeable(true);
        match feature {
            FeatureId::ARBITRATION
            | FeatureId::POWER_MANAGEMENT
            | FeatureId::TEMPERATURE_THRESHOLD
            | FeatureId::NUMBER_OF_QUEUES
            | FeatureId::INTERRUPT_COALESCING
            | FeatureId::INTERRUPT_VECTOR_CONFIGURATION
            | FeatureId::WRITE_ATOMICITY
            | FeatureId::ASYNC_EVENT_CONFIGURATION
            | FeatureId::TIMESTAMP
            | FeatureId::HOST_IDENTIFIER => Ok(changeable),
            FeatureId::VOLATILE_WRITE_CACHE if self.limits.cache => Ok(changeable),
            FeatureId::ERROR_RECOVERY => Ok(changeable.with_namespace_specific(true)),
            // A namespace is one range, of a general purpose.
            FeatureId::LBA_RANGE_TYPE => Ok(FeatureCapabilities::default().with_namespace_specific(true)),
            _ => Err(invalid(40, 0)),
        }
    }

    /// Get Features; `which` is dword 11, and `geometry` that of the namespace, where there is one.
    pub(super) fn get(
        &self,
        feature: FeatureId,
        select: FeatureSelect,
        nsid: Nsid,
        geometry: Option<&Geometry>,
        which: u32,
    ) -> Result<Value, Failure> {
        let capabilities = self.capabilities(feature)?;
        let values = match select {
            FeatureSelect::CURRENT => &self.values,
            // What cannot be saved has its default saved (5.9).
            FeatureSelect::DEFAULT | FeatureSelect::SAVED => &self.defaults,
            FeatureSelect::CAPABILITIES => return Ok(capabilities.bits().into()),
            _ => return Err(invalid(SELECT, 0)),
        };
        match feature {
            FeatureId::LBA_RANGE_TYPE => {
                let geometry = geometry.ok_or(Status::INVALID_NAMESPACE)?;
                let mut data = vec![0; LbaRangeType::LIST_SIZE];
                let range = LbaRangeType {
                    attributes: LbaRangeAttributes::default().with_overwritable(true),
                    // It counts from 0.
                    blocks: geometry.blocks.saturating_sub(1).into(),
                    ..LbaRangeType::default()
                };
                for (byte, value) in data.iter_mut().zip(range.as_bytes()) {
                    *byte = *value;
                }
                Ok(Value { result: 0, data })
            }
            FeatureId::ERROR_RECOVERY => {
                let value = place(nsid).and_then(|place| values.error_recovery.get(place));
                Ok(value.copied().ok_or(Status::INVALID_NAMESPACE)?.into())
            }
            FeatureId::TIMESTAMP => {
                let timestamp =
                    if select == FeatureSelect::CURRENT { values.timestamp.get() } else { U64::ZERO };
                Ok(Value { result: 0, data: timestamp.as_bytes().to_vec() })
            }
            FeatureId::HOST_IDENTIFIER => {
                let size = HostIdentifierSize::from_bits(which).bytes();
                Ok(Value { result: 0, data: values.host.0.get(..size).unwrap_or_default().to_vec() })
            }
            _ => Ok(self.number(values, feature, which)?.into()),
        }
    }

    /// The value of a feature that is a number.
    fn number(&self, values: &Values, feature: FeatureId, which: u32) -> Result<u32, Failure> {
        match feature {
            FeatureId::ARBITRATION => Ok(values.arbitration),
            FeatureId::POWER_MANAGEMENT => Ok(values.power),
            FeatureId::TEMPERATURE_THRESHOLD => {
                let which = TemperatureThreshold::from_bits(which);
                if which.sensor() != COMPOSITE {
                    return Err(invalid(DWORD11 + 2, 0));
                }
                match which.threshold_type() {
                    0 => Ok(u32::from(values.over_temperature)),
                    1 => Ok(u32::from(values.under_temperature)),
                    _ => Err(invalid(DWORD11 + 2, 4)),
                }
            }
            FeatureId::VOLATILE_WRITE_CACHE => {
                Ok(VolatileWriteCache::default().with_enabled(values.write_cache).bits())
            }
            FeatureId::NUMBER_OF_QUEUES => Ok(self.queues()),
            FeatureId::INTERRUPT_COALESCING => Ok(values.coalescing.bits()),
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                let vector = InterruptVectorConfiguration::from_bits(which).vector();
                let disabled =
                    *values.coalescing_disabled.get(usize::from(vector)).ok_or(invalid(DWORD11, 0))?;
                Ok(InterruptVectorConfiguration::default()
                    .with_vector(vector)
                    .with_coalescing_disabled(disabled)
                    .bits())
            }
            FeatureId::WRITE_ATOMICITY => Ok(values.write_atomicity),
            FeatureId::ASYNC_EVENT_CONFIGURATION => Ok(values.async_events.bits()),
            _ => Err(invalid(40, 0)),
        }
    }

    /// Whether Set Features may set a feature at all, and how many bytes of data it takes; `value` is dword 11.
    pub(super) fn check_set(
        &self,
        feature: FeatureId,
        save: bool,
        nsid: Nsid,
        value: u32,
    ) -> Result<usize, Failure> {
        let capabilities = self.capabilities(feature)?;
        let is_namespace = place(nsid).is_some_and(|place| place < self.limits.namespaces);
        if save {
            Err(Status::FEATURE_NOT_SAVEABLE.into())
        } else if capabilities.namespace_specific() && !is_namespace && nsid != NSID_ALL {
            Err(Status::INVALID_NAMESPACE.into())
        } else if !capabilities.namespace_specific() && nsid != Nsid(0) && nsid != NSID_ALL {
            Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.into())
        } else if !capabilities.changeable() {
            Err(Status::FEATURE_NOT_CHANGEABLE.into())
        } else {
            Ok(match feature {
                FeatureId::TIMESTAMP => size_of::<U64>(),
                FeatureId::HOST_IDENTIFIER => HostIdentifierSize::from_bits(value).bytes(),
                _ => 0,
            })
        }
    }

    /// Set Features, after [`Features::check_set`]: dword 0 of its completion.
    pub(super) fn set(
        &mut self,
        feature: FeatureId,
        nsid: Nsid,
        value: u32,
        data: &Data,
    ) -> Result<u32, Failure> {
        let values = &mut self.values;
        match feature {
            FeatureId::ARBITRATION => values.arbitration = value & 0xffff_ff07,
            FeatureId::POWER_MANAGEMENT => {
                // NPSS is 0: there is one power state.
                if PowerManagement::from_bits(value).state() != 0 {
                    return Err(invalid(DWORD11, 0));
                }
                values.power = value & 0xff;
            }
            FeatureId::TEMPERATURE_THRESHOLD => {
                let threshold = TemperatureThreshold::from_bits(value);
                if !matches!(threshold.sensor(), COMPOSITE | ALL_SENSORS) {
                    return Err(invalid(DWORD11 + 2, 0));
                }
                match threshold.threshold_type() {
                    0 => values.over_temperature = threshold.kelvin(),
                    1 => values.under_temperature = threshold.kelvin(),
                    _ => return Err(invalid(DWORD11 + 2, 4)),
                }
            }
            FeatureId::ERROR_RECOVERY => {
                // NSFEAT does not offer deallocated block errors.
                if ErrorRecovery::from_bits(value).deallocated_error() {
                    return Err(invalid(DWORD11 + 2, 0));
                }
                let only = place(nsid).filter(|_| nsid != NSID_ALL);
                for (place, recovery) in values.error_recovery.iter_mut().enumerate() {
                    if only.is_none_or(|only| only == place) {
                        *recovery = value & 0xffff;
                    }
                }
            }
            FeatureId::VOLATILE_WRITE_CACHE => {
                values.write_cache = VolatileWriteCache::from_bits(value).enabled();
            }
            FeatureId::NUMBER_OF_QUEUES => {
                let wanted = NumberOfQueues::from_bits(value);
                for (count, byte) in [(wanted.submission(), DWORD11), (wanted.completion(), DWORD11 + 2)] {
                    if count == u16::MAX {
                        return Err(invalid(byte, 0));
                    }
                }
                return Ok(self.queues());
            }
            FeatureId::INTERRUPT_COALESCING => {
                values.coalescing = InterruptCoalescing::from_bits(value & 0xffff);
            }
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                let with = InterruptVectorConfiguration::from_bits(value);
                let disabled = values
                    .coalescing_disabled
                    .get_mut(usize::from(with.vector()))
                    .ok_or(invalid(DWORD11, 0))?;
                *disabled = with.coalescing_disabled();
            }
            FeatureId::WRITE_ATOMICITY => {
                let atomicity = WriteAtomicity::from_bits(value);
                values.write_atomicity =
                    WriteAtomicity::default().with_disable_normal(atomicity.disable_normal()).bits();
            }
            // What OAES offers, and the critical warnings.
            FeatureId::ASYNC_EVENT_CONFIGURATION => {
                let asked = AsyncEventConfiguration::from_bits(value);
                values.async_events = AsyncEventConfiguration::default()
                    .with_critical_warnings(asked.critical_warnings())
                    .with_namespace_attributes(asked.namespace_attributes());
            }
            FeatureId::TIMESTAMP => {
                let [a, b, c, d, e, f, g, h, ..] = *data;
                values.timestamp.set(U64::from_bytes([a, b, c, d, e, f, g, h]));
            }
            FeatureId::HOST_IDENTIFIER => values.host = HostIdentifier(*data),
            _ => return Err(invalid(40, 0)),
        }
        Ok(0)
    }

    fn queues(&self) -> u32 {
        let count = self.limits.pairs.saturating_sub(1);
        NumberOfQueues::default().with_submission(count).with_completion(count).bits()
    }
}

/// The place of a namespace among them.
fn place(nsid: Nsid) -> Option<usize> {
    usize::try_from(nsid.0.checked_sub(1)?).ok()
}
