//! The command line.

use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::disk::NamespaceSpec;
use crate::nvme::DoorbellMode;

const EXAMPLES: &str = "\
Examples:
  An image of 10 GiB as a drive:
    truncate -s 10G disk.img
    outboard-server nvme --socket-path /run/drive.sock --namespace file:disk.img

  Two namespaces, one of them read-only with blocks of 4 KiB:
    outboard-server nvme --socket-path /run/drive.sock \\
        --namespace file:disk.img --namespace file:data.img,block-size=4096,read-only

  Memory that is lost when the server ends, and a drive that sleeps when idle:
    outboard-server nvme --socket-path /run/drive.sock --namespace ram:1G --doorbells posted

  QEMU on that socket (the guest's memory has to be shared):
    qemu-system-x86_64 -M q35 -m 2G -object memory-backend-memfd,id=ram,size=2G,share=on \\
        -machine memory-backend=ram \\
        -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"type\":\"unix\",\"path\":\"/run/drive.sock\"}}'

Signals: SIGTERM and SIGINT finish what is under way, flush, and exit; SIGUSR1 prints the counters.
Exit status: 0 after a signal or when the client of --fd has left; 1 when the drive could not be served (the
reason is the last line on stderr); 2 for a wrong command line.";

/// Devices outside of the virtual machine monitor, over vfio-user.
#[derive(Debug, Parser)]
#[command(name = "outboard-server", version, about, propagate_version = true)]
pub struct Cli {
    /// Say more: -v what happens, -vv every detail. RUST_LOG overrides it.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
    /// What to serve.
    #[command(subcommand)]
    pub command: Command,
}

/// What to serve.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Plays an NVMe drive in software, on files or memory.
    #[command(after_help = EXAMPLES)]
    Nvme(Nvme),
}

/// Where clients come from.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
pub struct Socket {
    /// Listen on this UNIX socket. A stale socket file is replaced.
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,
    /// Use this inherited descriptor: a socket that listens, or one that is connected to the client.
    #[arg(long, value_name = "FDNUM")]
    pub fd: Option<RawFd>,
}

/// Options of `outboard-server nvme`.
#[derive(Args, Debug)]
pub struct Nvme {
    /// Where clients come from.
    #[command(flatten)]
    pub socket: Socket,
    /// A namespace, the first one has number 1: file:PATH (an image or a block device), ram:SIZE, or null:SIZE
    /// (moves no data, for measuring); SIZE as in 512M, 10G. Options follow after commas: block-size=512|4096,
    /// read-only.
    #[arg(long = "namespace", value_name = "SPEC", required = true)]
    pub namespaces: Vec<NamespaceSpec>,
    /// How doorbells arrive: mapped pages that a thread looks at (no messages; a timer when idle), or posted
    /// messages (few with shadow doorbells; asleep when idle).
    #[arg(long, value_enum, default_value_t = DoorbellMode::Mapped)]
    pub doorbells: DoorbellMode,
    /// How many I/O queue pairs the guest may create.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub queues: u16,
    /// How many entries a queue may have.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=65536))]
    pub queue_entries: u32,
    /// The serial number that the guest sees, at most 20 printable ASCII characters.
    #[arg(long, value_name = "TEXT", default_value = "outboard", value_parser = ascii::<20>)]
    pub serial: String,
    /// The model that the guest sees, at most 40 printable ASCII characters.
    #[arg(long, value_name = "TEXT", default_value = "Outboard NVMe drive", value_parser = ascii::<40>)]
    pub model: String,
}

fn ascii<const MOST: usize>(text: &str) -> Result<String, String> {
    if text.len() > MOST || !text.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        return Err(format!("give at most {MOST} printable ASCII characters"));
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_socket_or_a_descriptor_but_not_both_and_not_neither() {
        let parse = |arguments: &[&str]| {
            Cli::try_parse_from([&["outboard-server", "nvme", "--namespace", "null:1M"], arguments].concat())
        };
        assert!(parse(&["--socket-path", "s"]).is_ok());
        assert!(parse(&["--fd", "5"]).is_ok());
        assert!(parse(&["--socket-path", "s", "--fd", "5"]).is_err());
        assert!(parse(&[]).is_err());
        assert!(parse(&["--fd", "5", "--serial", "more than twenty characters"]).is_err());
        assert!(parse(&["--fd", "5", "--queues", "0"]).is_err());
    }
}
