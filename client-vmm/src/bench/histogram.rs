//! Latencies, counted in buckets whose width is 1/64 of what they count.

use std::time::Duration;

/// Buckets for each power of two.
const STEPS: usize = 64;
const STEP_BITS: u32 = STEPS.trailing_zeros();
const MASK: u128 = (STEPS - 1) as u128;

/// How often which time was seen; 32 KiB, so that recording stays in the cache.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: u128,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; STEPS * 64], total: 0, sum: 0 }
    }
}

impl Histogram {
    /// Counts one.
    #[inline]
    pub(super) fn record(&mut self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.counts.get_mut(bucket(nanoseconds)) {
            *count = count.saturating_add(1);
        }
        self.total = self.total.saturating_add(1);
        self.sum = self.sum.saturating_add(nanoseconds.into());
    }

    /// Adds what another one has counted.
    pub(super) fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        self.total = self.total.saturating_add(other.total);
        self.sum = self.sum.saturating_add(other.sum);
    }

    /// How many were counted.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Their mean, exactly.
    pub(super) fn mean(&self) -> Duration {
        let mean = self.sum.checked_div(self.total.into()).unwrap_or(0);
        Duration::from_nanos(u64::try_from(mean).unwrap_or(u64::MAX))
    }

    /// The time that `per_mille` of them do not exceed, at most 1/64 too long.
    pub(super) fn quantile(&self, per_mille: u64) -> Duration {
        let rank = u128::from(self.total).saturating_mul(per_mille.into()).div_ceil(1000).max(1);
        let mut seen = 0_u128;
        for (bucket, &count) in self.counts.iter().enumerate() {
            seen = seen.saturating_add(count.into());
            if seen >= rank {
                return Duration::from_nanos(longest(bucket));
            }
        }
        Duration::ZERO
    }
}

/// Small times have a bucket each; from 64 ns on the six bits below the highest one choose.
#[inline]
fn bucket(nanoseconds: u64) -> usize {
    let Some(shift) = nanoseconds.checked_ilog2().and_then(|bits| bits.checked_sub(STEP_BITS)) else {
        return usize::try_from(nanoseconds).unwrap_or(0);
    };
    let step = usize::try_from(nanoseconds >> shift).unwrap_or(0);
    (shift as usize).saturating_mul(STEPS).saturating_add(step)
}

/// The longest time in a bucket.
fn longest(bucket: usize) -> u64 {
    let Some(shift) = (bucket >> STEP_BITS).checked_sub(1) else { return bucket as u64 };
    let step = (bucket as u128 & MASK) | STEPS as u128;
    u64::try_from((step.saturating_add(1) << shift).saturating_sub(1)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn quantiles_are_close(mut times in proptest::collection::vec(0_u64..1 << 40, 1..200), per_mille in 1_u64..=1000) {
            let mut histogram = Histogram::default();
            let (left, right) = times.split_at(times.len() / 2);
            let mut other = Histogram::default();
            left.iter().for_each(|&time| histogram.record(Duration::from_nanos(time)));
            right.iter().for_each(|&time| other.record(Duration::from_nanos(time)));
            histogram.merge(&other);
            times.sort_unstable();
            let rank = (times.len() as u64 * per_mille).div_ceil(1000).max(1) as usize;
            let exact = times[rank - 1];
            let found = histogram.quantile(per_mille).as_nanos() as u64;
            prop_assert!(found >= exact && found - exact <= exact / 64, "{found} for {exact}");
            prop_assert_eq!(histogram.mean().as_nanos() as u64, times.iter().sum::<u64>() / times.len() as u64);
        }

        #[test]
        fn every_time_has_a_bucket(time: u64) {
            prop_assert!(longest(bucket(time)) >= time);
            prop_assert!(bucket(time) < STEPS * 64);
        }
    }
}
