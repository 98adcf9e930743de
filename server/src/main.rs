//! outboard-server: devices outside of the virtual machine monitor.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::absolute;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use clap::Parser;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use outboard_server::cli::{Cli, Command, DriveOptions, Nvme, Serve, Vfio, VfioCommand};
use outboard_server::config;
use outboard_server::control::{self, Served};
use outboard_server::log::Log;
use outboard_server::nvme::Drive;
use outboard_server::snippet::{Vmm, snippet};
use outboard_server::vfio::host::Host;
use outboard_server::vfio::list;
use outboard_vfio_user::memory::guard;
use tracing::{Span, error_span};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = ["warn", "info", "debug"].get(usize::from(cli.verbose)).unwrap_or(&"trace");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(*level));
    let log = Log::new(stderr());
    if let Ok(log) = log.as_ref().map(Clone::clone) {
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(move || log.clone())
            .with_ansi(stderr().is_terminal())
            .init();
    }
    let result = log.context("The log's thread cannot be started").and_then(|log| {
        let result = match cli.command {
            Command::Nvme(arguments) => nvme(arguments),
            Command::Serve(arguments) => serve(arguments),
            Command::Vfio(arguments) => vfio(arguments),
        };
        log.settle();
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(stderr(), "outboard-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn nvme(Nvme { drive, print: vmm }: Nvme) -> anyhow::Result<()> {
    match vmm {
        Some(vmm) => print(&told(vmm, &drive)?),
        None => run(vec![(String::new(), drive)]),
    }
}

fn serve(Serve { config: path, check, print: vmm, drive: only }: Serve) -> anyhow::Result<()> {
    let drives = config::read(&path)?;
    if check {
        return print(&format!("{}: {} drives, nothing wrong\n", path.display(), drives.len()));
    }
    if let Some(vmm) = vmm {
        let wanted: Vec<_> =
            drives.iter().filter(|drive| only.as_ref().is_none_or(|only| *only == drive.name)).collect();
        if let (Some(only), []) = (only, wanted.as_slice()) {
            let names: Vec<_> = drives.iter().map(|drive| drive.name.as_str()).collect();
            bail!("{} has no drive {only}; its drives are {}", path.display(), names.join(", "));
        }
        let texts = wanted
            .iter()
            .map(|drive| told(vmm, &drive.options).map_err(|error| anyhow!("{}: {error}", drive.place)));
        return print(&texts.collect::<anyhow::Result<Vec<_>>>()?.join("\n"));
    }
    run(drives.into_iter().map(|drive| (format!("{}: ", drive.place), drive.options)).collect())
}

fn vfio(Vfio { command }: Vfio) -> anyhow::Result<()> {
    let host = Host::default();
    match command {
        VfioCommand::List { json } => {
            let drives = host.drives()?;
            print(&if json { list::json(&drives) } else { list::text(&drives) })
        }
        VfioCommand::Bind { address } => {
            let function = host.bind(address)?;
            // What else is in the way is not this command's failure.
            let next = function
                .ready()
                .map_or_else(|error| error.to_string(), |group| format!("/dev/vfio/{group} is its group"));
            print(&format!("{address} is in the hands of vfio-pci. {next}\n"))
        }
        VfioCommand::Unbind { address } => {
            let driver = host.unbind(address)?.driver;
            print(&match driver {
                Some(driver) => format!("{address} is driven by {driver}\n"),
                None => format!("{address} was taken back, and no driver of this kernel takes it\n"),
            })
        }
    }
}

/// What a VMM is told of a drive.
fn told(vmm: Vmm, drive: &DriveOptions) -> anyhow::Result<String> {
    let path = drive.socket.socket_path.as_ref();
    let path = path.ok_or_else(|| anyhow!("A VMM is told the path of a socket; say --socket-path"))?;
    Ok(snippet(vmm, drive.name.as_deref(), &absolute(path)?)?)
}

fn print(text: &str) -> anyhow::Result<()> {
    stdout().write_all(text.as_bytes()).context("Nobody takes what was asked for")
}

/// The standard three, those of the control plane, and room for what libraries open for a moment.
const OWN_DESCRIPTORS: usize = 32;

/// Descriptors are the process's: if all clients took what they can make us have, there would still be some.
fn raise_descriptors(need: usize) -> anyhow::Result<()> {
    // The soft limit is for programs that use select(2).
    let (_, limit) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, limit, limit)?;
    let need = need as u64;
    if need > limit {
        bail!(
            "The clients of these drives may need {need} open files, and this process may have {limit}; raise the \
             limit (ulimit -Hn {need}, or LimitNOFILE={need} in a unit of systemd)"
        );
    }
    Ok(())
}

/// Serves drives, each with what stands before the errors that are about it.
fn run(drives: Vec<(String, DriveOptions)>) -> anyhow::Result<()> {
    let drives_need = drives.iter().map(|(_, options)| options.descriptors()).sum::<usize>();
    raise_descriptors(drives_need.saturating_add(OWN_DESCRIPTORS))?;
    // A client that shrinks its memory under us loses its session, and nobody else anything.
    guard::install().map_err(|error| anyhow!("The SIGBUS handler cannot be installed: {error}"))?;
    // First all images, then all sockets: who can connect is served.
    let mut opened = Vec::new();
    for (place, options) in drives {
        let span = options.name.as_ref().map_or_else(Span::none, |name| error_span!("drive", %name));
        let drive = span.in_scope(|| Drive::new(options.clone().into()));
        let drive = drive.map_err(|error| anyhow!("{place}{error}"))?;
        opened.push((place, options, span, drive));
    }
    let mut served = Vec::new();
    for (place, options, span, drive) in opened {
        let source = options.source().map_err(|error| anyhow!("{place}{error}"))?;
        served.push(Served { name: options.name, span, source, service: Arc::new(drive) });
    }
    Ok(control::run(served)?)
}
