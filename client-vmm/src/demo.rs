//! Shows that a drive in another process works: everything that is written comes back, through each way that a
//! doorbell can take, and what each costs.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use outboard_nvme::driver;
use outboard_vfio_user::client::Sharing;

use crate::bench::{self, BenchError, DeviceSpec, Figures, Pattern, Workload};
use crate::drive::{Attachment, DoorbellAccess, DriveError, attach, detach};

mod content;
mod server;

use content::Content;
use server::Server;

const EXAMPLES: &str = "\
Examples:
  # Everything, on a temporary image
  outboard-vmm demo

  # Only doorbells by messages, for longer
  outboard-vmm demo --doorbells posted --time 5s";

/// The command line.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// outboard-server, if it does not lie beside this program
    #[arg(long)]
    pub server: Option<PathBuf>,
    /// Which doorbells to show; both unless said
    #[arg(long)]
    pub doorbells: Option<ServerDoorbells>,
    /// How large the temporary image is
    #[arg(long, default_value = "64m", value_parser = bench::parse_size)]
    pub size: usize,
    /// How long each measurement takes
    #[arg(long, default_value = "2s", value_parser = bench::parse_time)]
    pub time: Duration,
}

/// The server's `--doorbells`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ServerDoorbells {
    /// Clients map them.
    Mapped,
    /// They are messages.
    Posted,
}

/// A way for doorbells to take.
#[derive(Clone, Copy, Debug)]
struct Way {
    name: &'static str,
    server: ServerDoorbells,
    client: DoorbellAccess,
    shadow: bool,
}

const WAYS: [Way; 3] = [
    Way {
        name: "mapped doorbells",
        server: ServerDoorbells::Mapped,
        client: DoorbellAccess::Mapped,
        shadow: false,
    },
    Way {
        name: "posted doorbells",
        server: ServerDoorbells::Posted,
        client: DoorbellAccess::Posted,
        shadow: false,
    },
    Way {
        name: "posted and shadow doorbells",
        server: ServerDoorbells::Posted,
        client: DoorbellAccess::Posted,
        shadow: true,
    },
];

/// Why it did not work.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// There is no server to start.
    #[error("There is no {path}: build it with `cargo build --release -p outboard-server`, or say --server", path = path.display())]
    NoServer {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The server does not start.
    #[error("The server cannot be started")]
    Start(#[source] io::Error),
    /// The server ended too early, or badly, or not at all.
    #[error("The server {0}")]
    Server(String),
    /// Files.
    #[error("The temporary image failed")]
    Image(#[source] io::Error),
    /// The drive.
    #[error(transparent)]
    Drive(#[from] DriveError),
    /// The drive's queues or memory.
    #[error("The drive failed")]
    Driver(#[from] driver::Error),
    /// An I/O failed.
    #[error("An I/O failed")]
    Io(#[from] driver::CommandError),
    /// I/Os that do not end.
    #[error("{count} I/Os did not end in time")]
    Lost {
        /// How many.
        count: usize,
    },
    /// The drive lost or mixed up data.
    #[error("{place} does not hold what was written at byte {offset:#x}")]
    Corrupt {
        /// The drive or its image.
        place: &'static str,
        /// The first wrong byte's place, to 8 bytes.
        offset: u64,
    },
    /// The measurement.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// The drive has no namespace.
    #[error("The drive has no namespace")]
    NoNamespace,
}

/// Shows what the command line asks for.
///
/// # Errors
/// [`DemoError`]
pub fn run(arguments: &Arguments) -> Result<(), DemoError> {
    let program = match &arguments.server {
        Some(program) => program.clone(),
        None => std::env::current_exe().map_err(DemoError::Start)?.with_file_name("outboard-server"),
    };
    if !program.is_file() {
        return Err(DemoError::NoServer { path: program });
    }
    let folder = tempfile::tempdir().map_err(DemoError::Image)?;
    let mut results = Vec::new();
    let ways = WAYS.iter().filter(|way| arguments.doorbells.is_none_or(|wanted| wanted == way.server));
    for (seed, way) in (1..).zip(ways) {
        let content = Content::new(seed, arguments.size);
        results.push((way.name, show(*way, &program, folder.path(), content, arguments)?));
    }
    print_results(&results);
    Ok(())
}

/// One way: write, read back, verify, measure, and look at the image once the server has ended.
fn show(
    way: Way,
    program: &Path,
    folder: &Path,
    content: Content,
    arguments: &Arguments,
) -> Result<Figures, DemoError> {
    let image = folder.join("disk.img");
    let socket = folder.join("drive.sock");
    let file = std::fs::File::create(&image).map_err(DemoError::Image)?;
    file.set_len(content.size()).map_err(DemoError::Image)?;
    drop(file);

    println!("{}:", way.name);
    println!("  starting the server on an image of {} MiB", content.size() >> 20);
    let server = Server::start(program, &socket, &image, way.server)?;
    let client = server.connect(&socket)?;

    let memory = content::MEMORY;
    let attachment = Attachment { doorbells: way.client, sharing: Sharing::Descriptor, memory };
    let mut drive = attach(&client, attachment)?;
    let nsid = drive.namespaces()?.first().copied().ok_or(DemoError::NoNamespace)?;
    let namespace = drive.namespace(nsid)?;
    drive.request_queues(std::num::NonZeroU16::MIN)?;
    if way.shadow {
        drive.use_shadow_doorbells()?;
    }
    let start = Instant::now();
    content.write_and_verify(&mut drive, namespace)?;
    println!("  wrote it, read it back and verified it in {:.1} s", start.elapsed().as_secs_f64());
    detach(drive)?;

    println!("  measuring 4 KiB random reads at depth 32 for {:?}", arguments.time);
    let device = DeviceSpec {
        socket: socket.clone(),
        doorbells: way.client,
        shadow: way.shadow,
        sharing: Sharing::Descriptor,
    };
    let workload =
        Workload { pattern: Pattern::Randread, block: 4096, depth: 32, time: arguments.time, cpu: None };
    let figures = bench::measure(&client, &device, 1, workload)?;
    drop(client);
    server.stop()?;
    content.verify_image(&image)?;
    println!("  the server has ended, and its image holds what was written");
    Ok(figures)
}

fn print_results(results: &[(&str, Figures)]) {
    println!();
    println!(
        "{:<28} {:>10} {:>9} {:>9} {:>12}",
        "4 KiB random reads", "IOPS", "p50 us", "p99 us", "messages/IO"
    );
    for (name, figures) in results {
        println!(
            "{name:<28} {:>10.0} {:>9.2} {:>9.2} {:>12.6}",
            figures.iops, figures.latency.p50, figures.latency.p99, figures.messages_per_io
        );
    }
}
