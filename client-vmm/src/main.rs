//! outboard-vmm: a thin main over the library.

use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use outboard_vmm::{bench, demo};

#[derive(Parser)]
#[command(version, about = "A vfio-user client that drives devices in other processes")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure an NVMe drive behind a vfio-user socket
    Bench(bench::Arguments),
    /// Show a drive at work: write, read back, verify, measure
    Demo(demo::Arguments),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match run(&Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("outboard-vmm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Bench(arguments) => bench::run(arguments).context("The benchmark failed"),
        Command::Demo(arguments) => demo::run(arguments).context("The demonstration failed"),
    }
}
