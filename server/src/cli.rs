//! The command line.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use outboard_vfio_user::limits;
use outboard_vfio_user::listen::{ListenError, Source};

use crate::disk::NamespaceSpec;
use crate::nvme::{self, DoorbellMode};
use crate::snippet::Vmm;
use crate::vfio::host::Address;

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

  What QEMU is told about that drive (or libvirt, or Cloud Hypervisor):
    outboard-server nvme --socket-path /run/drive.sock --namespace ram:1G --print qemu

Signals: SIGTERM and SIGINT finish what is under way, flush, and exit; SIGUSR1 prints the counters.
Exit status: 0 after a signal or when the client of --fd has left; 1 when the drive could not be served (the
reason is the last line on stderr); 2 for a wrong command line.";

const SERVE_EXAMPLES: &str = concat!(
    "\
The keys of a [[drive]] are the options of `outboard-server nvme`, without their dashes.
Relative paths start at the file's directory. For example:

",
    include_str!("config/example.toml"),
    "
Signals: SIGTERM and SIGINT finish what is under way in every drive, flush, and exit; SIGUSR1
prints the counters, each with its drive's name in front.
Exit status: 0 after a signal; 1 when the file is wrong or a drive could not be served, and then
none is (the reason is the last line on stderr); 2 for a wrong command line."
);

const VFIO_EXAMPLES: &str = "\
Examples:
  The drives of this machine, what drives them, and the commands that hand each over:
    outboard-server vfio list

  The same for programs; what keeps the first one from being served (null: nothing):
    outboard-server vfio list --json | jq -r '.[0].obstacle'

  From the kernel's nvme driver to vfio-pci, and back:
    modprobe vfio-pci
    outboard-server vfio bind 0000:00:03.0
    outboard-server vfio unbind 0000:00:03.0

Exit status: 0 when it was done, or was so already; 1 when it was not (the reason is the last line
on stderr: the drive is mounted, a process holds it, a module is not loaded); 2 for a wrong command
line.";

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
    /// Plays several drives in one process, as a file says.
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(Serve),
    /// Physical drives: shows them, and hands them over to vfio-pci and back.
    #[command(after_help = VFIO_EXAMPLES)]
    Vfio(Vfio),
}

/// Where clients come from.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
pub struct Socket {
    /// Listen on this UNIX socket. A stale socket file is replaced.
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,
    /// Use this inherited descriptor: a socket that listens, or one that is connected to the client.
    #[arg(long, value_name = "FDNUM")]
    pub fd: Option<RawFd>,
}

/// Who may connect to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SocketAccess {
    /// This user.
    Owner,
    /// Also this user's group.
    Group,
    /// Every user of this machine.
    All,
}

impl SocketAccess {
    /// The mode of the socket's file: to connect is to write.
    fn mode(self) -> u32 {
        match self {
            Self::Owner => 0o600,
            Self::Group => 0o660,
            Self::All => 0o666,
        }
    }
}

/// `outboard-server nvme`.
#[derive(Args, Debug)]
pub struct Nvme {
    /// What the drive is made of.
    #[command(flatten)]
    pub drive: DriveOptions,
    /// Print what a VMM is told about this drive, and exit.
    #[arg(long, value_name = "VMM", value_enum)]
    pub print: Option<Vmm>,
}

/// `outboard-server serve`.
#[derive(Args, Debug)]
pub struct Serve {
    /// The file that lists the drives.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Say what is wrong with the file, if anything is, and exit.
    #[arg(long, conflicts_with = "print")]
    pub check: bool,
    /// Print what a VMM is told about the drives, and exit.
    #[arg(long, value_name = "VMM", value_enum)]
    pub print: Option<Vmm>,
    /// Only of the drive with this name.
    #[arg(long, value_name = "NAME", requires = "print")]
    pub drive: Option<String>,
}

/// `outboard-server vfio`.
#[derive(Args, Debug)]
pub struct Vfio {
    /// What to do.
    #[command(subcommand)]
    pub command: VfioCommand,
}

/// What to do with physical drives.
#[derive(Debug, Subcommand)]
pub enum VfioCommand {
    /// Shows the NVMe drives of this machine, their IOMMU groups, what drives them, and the commands that hand each
    /// over.
    List {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Takes a PCI function from its driver and gives it to vfio-pci, until it is unbound or the machine restarts.
    /// One that this machine uses (mounted, swap, part of another disk) is refused.
    Bind {
        /// Which, as in 0000:00:03.0.
        #[arg(value_name = "BDF")]
        address: Address,
    },
    /// Takes a PCI function from vfio-pci and gives it to the driver that the kernel chooses. Says who holds it, if
    /// anybody does, and then does nothing.
    Unbind {
        /// Which, as in 0000:00:03.0.
        #[arg(value_name = "BDF")]
        address: Address,
    },
}

/// What a drive is made of: options of `outboard-server nvme`, and keys of a `[[drive]]`.
#[derive(Args, Clone, Debug)]
pub struct DriveOptions {
    /// What the drive is called in the counters, in the log and by VMMs: a letter, then letters, digits, '-', '.'
    /// and '_'.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub name: Option<String>,
    /// Where clients come from.
    #[command(flatten)]
    pub socket: Socket,
    /// Who may connect to --socket-path; unless said, those that the umask lets.
    #[arg(long, value_enum, value_name = "WHO", requires = "socket_path")]
    pub socket_access: Option<SocketAccess>,
    /// A namespace, the first one has number 1: file:PATH (an image or a block device), ram:SIZE, or null:SIZE
    /// (moves no data, for measuring); SIZE as in 512M, 10G. Options follow after commas: block-size=512|4096,
    /// read-only.
    #[arg(long = "namespace", value_name = "SPEC", required = true)]
    pub namespaces: Vec<NamespaceSpec>,
    /// How doorbells arrive.
    #[arg(long, value_enum, default_value_t = DoorbellMode::Mapped)]
    pub doorbells: DoorbellMode,
    /// How many bytes lie between a doorbell and the next (CAP.DSTRD): a power of two from 4 to 131072. With 4096
    /// each has a page of its own. Not with posted doorbells.
    #[arg(long, value_name = "BYTES", default_value = "4", value_parser = stride)]
    pub doorbell_stride: u8,
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

/// CAP.DSTRD of a distance in bytes.
fn stride(text: &str) -> Result<u8, String> {
    let bytes = text.parse::<u32>().ok().filter(|bytes| bytes.is_power_of_two());
    let stride = bytes.and_then(|bytes| u8::try_from(bytes.ilog2().checked_sub(2)?).ok());
    stride.filter(|stride| *stride <= 15).ok_or_else(|| "give a power of two from 4 to 131072".into())
}

impl DriveOptions {
    /// With relative paths starting at `directory`.
    #[must_use]
    pub(crate) fn inside(self, directory: &Path) -> Self {
        let Self { socket: Socket { socket_path, fd }, namespaces, .. } = self;
        let socket_path = socket_path.map(|path| directory.join(path));
        let namespaces = namespaces.into_iter().map(|namespace| namespace.inside(directory)).collect();
        Self { socket: Socket { socket_path, fd }, namespaces, ..self }
    }

    /// How many descriptors the drive and its client can make this process have, at most.
    pub fn descriptors(&self) -> usize {
        // Of interrupts: a vector for each queue, the pin with its mask, errors and requests. Of each namespace: the
        // image, its ring, and what tells of completions, twice; of the drive: listener, doorbells, bell.
        usize::from(self.queues)
            .saturating_add(limits::SESSION_DESCRIPTORS)
            .saturating_add(self.namespaces.len().saturating_mul(4))
            .saturating_add(16)
    }

    /// Where clients come from.
    ///
    /// # Errors
    /// [`ListenError`]
    pub fn source(&self) -> Result<Source, ListenError> {
        match (&self.socket.socket_path, self.socket.fd) {
            (Some(path), _) => Source::bind_as(path, self.socket_access.map(SocketAccess::mode)),
            // Neither does not get past clap.
            (None, fd) => Source::inherited(fd.unwrap_or(-1)),
        }
    }
}

impl From<DriveOptions> for nvme::Options {
    fn from(options: DriveOptions) -> Self {
        Self {
            namespaces: options.namespaces,
            doorbells: options.doorbells,
            doorbell_stride: options.doorbell_stride,
            queue_pairs: options.queues,
            queue_entries: options.queue_entries,
            serial: options.serial,
            model: options.model,
        }
    }
}

/// What QEMU takes as the identifier of a device (id_wellformed), of a length that reads well.
fn name(text: &str) -> Result<String, String> {
    let well_formed = text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.chars().all(|other| other.is_ascii_alphanumeric() || "-._".contains(other));
    if !well_formed || text.len() > 64 {
        return Err("give a letter, then letters, digits, '-', '.' and '_', at most 64".into());
    }
    Ok(text.into())
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
    fn a_physical_drive_is_named_by_its_address() {
        let parse =
            |arguments: &[&str]| Cli::try_parse_from([&["outboard-server", "vfio"], arguments].concat());
        for command in ["bind", "unbind"] {
            assert!(parse(&[command, "0000:00:03.0"]).is_ok());
            assert!(parse(&[command, "00:03.0"]).is_ok());
            assert!(parse(&[command]).is_err());
            let error = parse(&[command, "nvme0"]).unwrap_err().to_string();
            assert!(error.contains("\"nvme0\" is no address of a PCI function; give one as in"), "{error}");
        }
        assert!(parse(&["list", "--json"]).is_ok());
        assert!(parse(&[]).is_err());
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
        assert!(parse(&["--fd", "5", "--doorbell-stride", "131072"]).is_ok());
        for wrong in ["0", "2", "12", "262144", "-4", "page"] {
            assert!(parse(&["--fd", "5", "--doorbell-stride", wrong]).is_err(), "{wrong}");
        }
        assert!(parse(&["--fd", "5", "--name", "data-1.old_"]).is_ok());
        for name in ["", "1", "a b", "a,b", "ä"] {
            assert!(parse(&["--fd", "5", "--name", name]).is_err(), "{name}");
        }
    }
}
