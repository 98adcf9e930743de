//! Features that are a number (Base Specification 1.4, section 5.21.1). None can be saved.

use super::health::{TEMPERATURE, WARNING_TEMPERATURE};
use crate::spec::{
    Arbitration, AsyncEventConfiguration, ErrorRecovery, FeatureCapabilities, FeatureId, FeatureSelect,
    InterruptVectorConfiguration, NumberOfQueues, PowerManagement, Status, TemperatureThreshold,
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
}

/// The values; a reset brings the defaults back.
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
    error_recovery: u32,
    write_cache: bool,
    coalescing: u32,
    /// By vector: coalescing is off for it.
    coalescing_disabled: Vec<bool>,
    write_atomicity: u32,
    async_events: AsyncEventConfiguration,
}

/// TMPSEL: the composite temperature, and all temperatures.
const COMPOSITE: u8 = 0;
const ALL_SENSORS: u8 = 15;

impl Features {
    pub(super) fn new(limits: FeatureLimits) -> Self {
        let values = Values {
            // No limit to a burst.
            arbitration: Arbitration::default().with_burst(7).bits(),
            power: 0,
            over_temperature: WARNING_TEMPERATURE,
            under_temperature: 0,
            error_recovery: 0,
            write_cache: limits.cache,
            coalescing: 0,
            coalescing_disabled: vec![false; usize::from(limits.vectors)],
            write_atomicity: 0,
            async_events: AsyncEventConfiguration::default(),
        };
        Self { limits, defaults: values.clone(), values }
    }

    /// A controller reset.
    pub(super) fn reset(&mut self) {
        self.values.clone_from(&self.defaults);
    }

    /// Whether writes may complete before they are durable.
    #[inline]
    pub(super) fn write_cache(&self) -> bool {
        self.values.write_cache
    }

    /// Whether the composite temperature is beyond a threshold.
    pub(super) fn is_too_warm_or_cold(&self) -> bool {
        TEMPERATURE >= self.values.over_temperature || TEMPERATURE <= self.values.under_temperature
    }

    /// Whether that is to be reported as an event.
    pub(super) fn reports_temperature(&self) -> bool {
        self.is_too_warm_or_cold() && self.values.async_events.critical_warnings() & 0b10 != 0
    }

    /// Whether changes of namespaces are to be reported as events.
    pub(super) fn reports_namespaces(&self) -> bool {
        self.values.async_events.namespace_attributes()
    }

    /// Get Features: dword 0 of its completion. `which` is dword 11.
    pub(super) fn get(&self, feature: FeatureId, select: FeatureSelect, which: u32) -> Result<u32, Status> {
        match select {
            FeatureSelect::CURRENT => self.value(&self.values, feature, which),
            // What cannot be saved has its default saved (5.9).
            FeatureSelect::DEFAULT | FeatureSelect::SAVED => self.value(&self.defaults, feature, which),
            FeatureSelect::CAPABILITIES => {
                self.value(&self.values, feature, 0)?;
                Ok(FeatureCapabilities::default().with_changeable(true).bits())
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    fn value(&self, values: &Values, feature: FeatureId, which: u32) -> Result<u32, Status> {
        match feature {
            FeatureId::ARBITRATION => Ok(values.arbitration),
            FeatureId::POWER_MANAGEMENT => Ok(values.power),
            FeatureId::TEMPERATURE_THRESHOLD => {
                let which = TemperatureThreshold::from_bits(which).with_kelvin(0);
                if which.sensor() != COMPOSITE {
                    return Err(Status::INVALID_FIELD);
                }
                match which.threshold_type() {
                    0 => Ok(u32::from(values.over_temperature)),
                    1 => Ok(u32::from(values.under_temperature)),
                    _ => Err(Status::INVALID_FIELD),
                }
            }
            FeatureId::ERROR_RECOVERY => Ok(values.error_recovery),
            FeatureId::VOLATILE_WRITE_CACHE if self.limits.cache => {
                Ok(VolatileWriteCache::default().with_enabled(values.write_cache).bits())
            }
            FeatureId::NUMBER_OF_QUEUES => Ok(self.queues()),
            FeatureId::INTERRUPT_COALESCING => Ok(values.coalescing),
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                let vector = InterruptVectorConfiguration::from_bits(which).vector();
                let disabled =
                    *values.coalescing_disabled.get(usize::from(vector)).ok_or(Status::INVALID_FIELD)?;
                Ok(InterruptVectorConfiguration::default()
                    .with_vector(vector)
                    .with_coalescing_disabled(disabled)
                    .bits())
            }
            FeatureId::WRITE_ATOMICITY => Ok(values.write_atomicity),
            FeatureId::ASYNC_EVENT_CONFIGURATION => Ok(values.async_events.bits()),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Set Features: dword 0 of its completion. `value` is dword 11.
    pub(super) fn set(&mut self, feature: FeatureId, value: u32) -> Result<u32, Status> {
        let values = &mut self.values;
        match feature {
            FeatureId::ARBITRATION => values.arbitration = value & 0xffff_ff07,
            FeatureId::POWER_MANAGEMENT => {
                // NPSS is 0: there is one power state.
                if PowerManagement::from_bits(value).state() != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                values.power = value & 0xff;
            }
            FeatureId::TEMPERATURE_THRESHOLD => {
                let threshold = TemperatureThreshold::from_bits(value);
                if !matches!(threshold.sensor(), COMPOSITE | ALL_SENSORS) {
                    return Err(Status::INVALID_FIELD);
                }
                match threshold.threshold_type() {
                    0 => values.over_temperature = threshold.kelvin(),
                    1 => values.under_temperature = threshold.kelvin(),
                    _ => return Err(Status::INVALID_FIELD),
                }
            }
            FeatureId::ERROR_RECOVERY => {
                // NSFEAT does not offer deallocated block errors.
                if ErrorRecovery::from_bits(value).deallocated_error() {
                    return Err(Status::INVALID_FIELD);
                }
                values.error_recovery = value & 0xffff;
            }
            FeatureId::VOLATILE_WRITE_CACHE if self.limits.cache => {
                values.write_cache = VolatileWriteCache::from_bits(value).enabled();
            }
            FeatureId::NUMBER_OF_QUEUES => {
                let wanted = NumberOfQueues::from_bits(value);
                if wanted.submission() == u16::MAX || wanted.completion() == u16::MAX {
                    return Err(Status::INVALID_FIELD);
                }
                return Ok(self.queues());
            }
            FeatureId::INTERRUPT_COALESCING => values.coalescing = value & 0xffff,
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                let with = InterruptVectorConfiguration::from_bits(value);
                let disabled = values
                    .coalescing_disabled
                    .get_mut(usize::from(with.vector()))
                    .ok_or(Status::INVALID_FIELD)?;
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
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(0)
    }

    fn queues(&self) -> u32 {
        let count = self.limits.pairs.saturating_sub(1);
        NumberOfQueues::default().with_submission(count).with_completion(count).bits()
    }
}
