//! The figures of a run.

use std::time::Duration;

use serde::Serialize;

use super::Pattern;
use super::histogram::Histogram;
use super::job::{Outcome, Workload};

/// What a run has shown.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// What was done.
    pub rw: Pattern,
    /// Bytes of an I/O.
    pub block: usize,
    /// Outstanding I/Os of each job.
    pub depth: u16,
    /// Threads.
    pub jobs: u16,
    /// How many I/Os ended.
    pub ios: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// I/Os in a second.
    pub iops: f64,
    /// How long they took.
    pub latency: Latency,
    /// Commands over the socket, both ways, for the whole run.
    pub messages: u64,
    /// The same for each I/O.
    pub messages_per_io: f64,
}

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// The mean.
    pub mean: f64,
    /// Half of them took no longer.
    pub p50: f64,
    /// 99 of 100 took no longer.
    pub p99: f64,
    /// 999 of 1000 took no longer.
    pub p999: f64,
}

impl Figures {
    pub(super) fn new(workload: Workload, jobs: u16, outcomes: &[Outcome], messages: u64) -> Self {
        let mut latencies = Histogram::default();
        outcomes.iter().for_each(|outcome| latencies.merge(&outcome.latencies));
        let elapsed = outcomes.iter().map(|outcome| outcome.elapsed).max().unwrap_or_default();
        let ios = latencies.total();
        let seconds = elapsed.as_secs_f64();
        Self {
            rw: workload.pattern,
            block: workload.block,
            depth: workload.depth,
            jobs,
            ios,
            seconds,
            iops: ratio(ios as f64, seconds),
            latency: Latency {
                mean: microseconds(latencies.mean()),
                p50: microseconds(latencies.quantile(500)),
                p99: microseconds(latencies.quantile(990)),
                p999: microseconds(latencies.quantile(999)),
            },
            messages,
            messages_per_io: ratio(messages as f64, ios as f64),
        }
    }

    /// MiB in a second.
    pub fn throughput(&self) -> f64 {
        self.iops * self.block as f64 / f64::from(1 << 20)
    }
}

/// One line for each run.
pub fn print_table(figures: &[Figures]) {
    println!(
        "{:<10} {:>8} {:>6} {:>5} {:>10} {:>9} {:>9} {:>9} {:>9} {:>12}",
        "rw", "block", "depth", "jobs", "IOPS", "MiB/s", "mean us", "p50 us", "p99 us", "messages/IO"
    );
    for run in figures {
        println!(
            "{:<10} {:>8} {:>6} {:>5} {:>10.0} {:>9.1} {:>9.2} {:>9.2} {:>9.2} {:>12.6}",
            super::pattern_name(run.rw),
            run.block,
            run.depth,
            run.jobs,
            run.iops,
            run.throughput(),
            run.latency.mean,
            run.latency.p50,
            run.latency.p99,
            run.messages_per_io,
        );
    }
}

fn ratio(of: f64, to: f64) -> f64 {
    if to > 0.0 { of / to } else { 0.0 }
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
