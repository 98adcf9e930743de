//! outboard-server: devices outside of the virtual machine monitor.

use std::io::{IsTerminal, Write, stderr};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::anyhow;
use clap::Parser;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use outboard_server::cli::{Cli, Command, Nvme};
use outboard_server::control;
use outboard_server::nvme::{Drive, Options};
use outboard_vfio_user::listen::Source;
use outboard_vfio_user::memory::guard;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = ["warn", "info", "debug"].get(usize::from(cli.verbose)).unwrap_or(&"trace");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(*level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        // It would panic when nobody reads the log any more.
        .log_internal_errors(false)
        .init();
    let result = match cli.command {
        Command::Nvme(options) => nvme(options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(stderr(), "outboard-server: {error}");
            ExitCode::FAILURE
        }
    }
}

fn nvme(arguments: Nvme) -> anyhow::Result<()> {
    // A descriptor for each vector of a client, and more: the soft limit is for programs that use select(2).
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    // A client that shrinks its memory under us loses its session, and nobody else anything.
    guard::install().map_err(|error| anyhow!("The SIGBUS handler cannot be installed: {error}"))?;
    let drive = Arc::new(Drive::new(Options {
        namespaces: arguments.namespaces,
        doorbells: arguments.doorbells,
        queue_pairs: arguments.queues,
        queue_entries: arguments.queue_entries,
        serial: arguments.serial,
        model: arguments.model,
    })?);
    let source = match (arguments.socket.socket_path, arguments.socket.fd) {
        (Some(path), _) => Source::bind(&path)?,
        (None, Some(fd)) => Source::inherited(fd)?,
        (None, None) => anyhow::bail!("Say --socket-path or --fd"),
    };
    tracing::info!("ready");
    Ok(control::run(source, &drive)?)
}
