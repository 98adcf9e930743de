//! Measures a drive: I/O per second, latency, and what crosses the socket for it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use outboard_nvme::driver;
use outboard_vfio_user::client::{Client, Options, Sharing};

use crate::drive::{Attachment, DoorbellAccess, DriveError, attach, detach};
use crate::limits;

mod histogram;
mod job;
mod report;

pub use job::{JobError, Workload};
pub use report::{Figures, Latency, print_table};

const EXAMPLES: &str = "\
Examples:
  # A drive in RAM, its server and the benchmark on a core each
  taskset -c 0 outboard-server nvme --socket-path /tmp/drive.sock --namespace ram:1G --doorbells mapped &
  outboard-vmm bench --device socket=/tmp/drive.sock --depth 1,32,128 --cpu 1

  # The same through messages
  outboard-vmm bench --device socket=/tmp/drive.sock,map=off,shadow=on --depth 32 --json";

/// The command line.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// The drive: socket=PATH, and after commas map=on|off, shadow=on|off, dma=shared|messages. map: doorbells by stores to
    /// mapped memory, or by messages (unless said: as the server allows); shadow: use shadow doorbells; dma:
    /// how the drive reaches the buffers
    #[arg(long, value_parser = DeviceSpec::parse)]
    pub device: DeviceSpec,
    /// Outstanding I/Os of each job; a list is a run each
    #[arg(long, value_delimiter = ',', default_value = "1,16,128")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(limits::DEPTH)))]
    pub depth: Vec<u16>,
    /// Threads, each with a queue pair of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(limits::JOBS)))]
    pub jobs: u16,
    /// Bytes of an I/O: 512, 4k, 1m
    #[arg(long, default_value = "4k", value_parser = parse_size)]
    pub block: usize,
    /// What to do. Writes destroy what is on the drive
    #[arg(long, default_value = "randread")]
    pub rw: Pattern,
    /// How long each run takes: 3s, 500ms
    #[arg(long, default_value = "3s", value_parser = parse_time)]
    pub time: Duration,
    /// Pin the jobs to this core and those after it
    #[arg(long)]
    pub cpu: Option<usize>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Reads from start to end, again and again.
    Read,
    /// Writes from start to end, again and again.
    Write,
    /// Reads at random places.
    Randread,
    /// Writes at random places.
    Randwrite,
    /// Reads and writes at random places, half each.
    Randrw,
}

/// `--device`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSpec {
    /// The server's socket.
    pub socket: PathBuf,
    /// How doorbells are written.
    pub doorbells: DoorbellAccess,
    /// Whether to use shadow doorbells.
    pub shadow: bool,
    /// How the drive reaches memory.
    pub sharing: Sharing,
}

impl DeviceSpec {
    /// `socket=PATH[,map=on|off][,shadow=on|off][,dma=shared|messages]`
    fn parse(text: &str) -> Result<Self, String> {
        let mut socket = None;
        let mut doorbells = DoorbellAccess::Any;
        let mut shadow = false;
        let mut sharing = Sharing::Descriptor;
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("socket", path)) if !path.is_empty() => socket = Some(PathBuf::from(path)),
                Some(("map", "on")) => doorbells = DoorbellAccess::Mapped,
                Some(("map", "off")) => doorbells = DoorbellAccess::Posted,
                Some(("shadow", "on")) => shadow = true,
                Some(("shadow", "off")) => shadow = false,
                Some(("dma", "shared")) => sharing = Sharing::Descriptor,
                Some(("dma", "messages")) => sharing = Sharing::Messages,
                _ => {
                    return Err(format!(
                        "'{part}' is none of socket=PATH, map=on|off, shadow=on|off, dma=shared|messages"
                    ));
                }
            }
        }
        let socket = socket.ok_or("socket=PATH is missing")?;
        Ok(Self { socket, doorbells, shadow, sharing })
    }
}

/// A number of bytes: 512, 4k, 1m, 2g.
pub(crate) fn parse_size(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: usize = match text.get(digits.len()..).unwrap_or_default().to_ascii_lowercase().as_str() {
        "" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        unit => return Err(format!("'{unit}' is none of k, m, g")),
    };
    let number: usize = digits.parse().map_err(|error| format!("'{digits}': {error}"))?;
    number.checked_mul(unit).filter(|&size| size > 0).ok_or_else(|| format!("{text} is out of range"))
}

/// A time: 3s, 500ms, or a number of seconds.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1),
        None => (text.strip_suffix('s').unwrap_or(text), 1000),
    };
    let number: u64 = number.parse().map_err(|error| format!("'{number}': {error}"))?;
    let milliseconds = number.checked_mul(unit).filter(|&time| (1..=3_600_000).contains(&time));
    milliseconds.map(Duration::from_millis).ok_or_else(|| format!("{text} is not between 1ms and 1h"))
}

/// Why there is no figure.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The drive could not be used.
    #[error(transparent)]
    Drive(#[from] DriveError),
    /// Nor this one's queues, memory or namespaces.
    #[error("The drive failed")]
    Driver(#[from] driver::Error),
    /// A job ended early.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The drive has nothing to read or write.
    #[error("The drive has no namespace")]
    NoNamespace,
    /// Fewer queues than jobs.
    #[error("The drive allows {allowed} queue pairs, not {jobs}")]
    Queues {
        /// How many it allows.
        allowed: u16,
        /// How many were wanted.
        jobs: u16,
    },
    /// The figures cannot be written as JSON.
    #[error("The figures cannot be printed")]
    Print(#[from] serde_json::Error),
}

/// Runs what the command line says, and prints the figures.
///
/// # Errors
/// [`BenchError`]
pub fn run(arguments: &Arguments) -> Result<(), BenchError> {
    let mut figures = Vec::new();
    for &depth in &arguments.depth {
        let workload = Workload {
            pattern: arguments.rw,
            block: arguments.block,
            depth,
            time: arguments.time,
            cpu: arguments.cpu,
        };
        let device = &arguments.device;
        let client = connect(&device.socket)?;
        eprintln!("{} at depth {depth} for {:?}", pattern_name(arguments.rw), arguments.time);
        figures.push(measure(&client, device, arguments.jobs, workload)?);
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&figures)?);
    } else {
        print_table(&figures);
    }
    Ok(())
}

fn pattern_name(pattern: Pattern) -> String {
    pattern.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Connects to a server.
pub(crate) fn connect(socket: &std::path::Path) -> Result<Arc<Client>, DriveError> {
    Ok(Arc::new(Client::connect(socket, Options::default())?))
}

/// Runs a workload on a fresh drive.
///
/// # Errors
/// [`BenchError`]
pub fn measure(
    client: &Arc<Client>,
    device: &DeviceSpec,
    jobs: u16,
    workload: Workload,
) -> Result<Figures, BenchError> {
    let memory = workload.memory().saturating_mul(jobs.into()).saturating_add(1 << 20);
    let attachment = Attachment { doorbells: device.doorbells, sharing: device.sharing, memory };
    let mut drive = attach(client, attachment)?;
    let nsid = drive.namespaces()?.first().copied().ok_or(BenchError::NoNamespace)?;
    let namespace = drive.namespace(nsid)?;
    let allowed = drive.request_queues(jobs.try_into().unwrap_or(std::num::NonZeroU16::MIN))?;
    if allowed < jobs {
        return Err(BenchError::Queues { allowed, jobs });
    }
    if device.shadow {
        drive.use_shadow_doorbells()?;
    }
    let prepared = (0..jobs)
        .map(|number| job::Job::new(client, &mut drive, namespace, workload, number))
        .collect::<Result<Vec<_>, _>>()?;
    let crossings = || client.sent().total().saturating_add(client.received().total());
    let before = crossings();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = prepared.into_iter().map(|job| scope.spawn(|| job.run())).collect();
        running.into_iter().map(|job| job.join().unwrap_or(Err(JobError::Panicked))).collect()
    });
    let messages = crossings().saturating_sub(before);
    let outcomes = outcomes.into_iter().collect::<Result<Vec<_>, _>>()?;
    let figures = Figures::new(workload, jobs, &outcomes, messages);
    detach(drive)?;
    Ok(figures)
}

#[cfg(test)]
mod tests;
