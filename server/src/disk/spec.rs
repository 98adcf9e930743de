//! What a user says a namespace is: `null:SIZE`, `ram:SIZE`, `file:PATH`, and options after commas.

use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use outboard_nvme::controller::Geometry;

use super::file::{Engine, File};
use super::null::Null;
use super::ram::Ram;
use super::{Backend, PinHost};

/// Where a namespace's blocks are.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Medium {
    Null { size: u64 },
    Ram { size: u64 },
    File { path: PathBuf, engine: Option<Engine> },
}

/// A namespace as described on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceSpec {
    medium: Medium,
    /// log2 of the LBA size.
    block_shift: u32,
    read_only: bool,
}

/// What is wrong with a description.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// No known medium.
    #[error("say null:SIZE, ram:SIZE or file:PATH")]
    Medium,
    /// Not a size.
    #[error("{0:?} is not a size; say a number of bytes, or one with K, M, G or T")]
    Size(String),
    /// No blocks, or a fraction of one.
    #[error(
        "{size} bytes are not a whole number of blocks of {block} bytes; choose another size or block-size"
    )]
    Fraction {
        /// In bytes.
        size: u64,
        /// The LBA size.
        block: u64,
    },
    /// An LBA size that is not offered.
    #[error("block-size={0} is not possible; say 512 or 4096")]
    BlockSize(String),
    /// An option that does not exist, or not for this medium.
    #[error(
        "{0:?} is not an option here; say block-size=512|4096, read-only, or for files engine=io_uring|threads"
    )]
    Option(String),
}

/// Why a namespace cannot be opened, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// No such file.
    #[error("{} does not exist; create it, for example with: truncate -s 10G {}", path.display(), path.display())]
    Missing {
        /// Which.
        path: PathBuf,
    },
    /// No permission.
    #[error("No permission to open {} for {}; change its mode{}", path.display(), if *read_only { "reading" } else { "writing" }, if *read_only { "" } else { ", or add read-only" })]
    Permission {
        /// Which.
        path: PathBuf,
        /// What was tried.
        read_only: bool,
    },
    /// A directory, a pipe, a terminal.
    #[error("{} is neither a file nor a block device", path.display())]
    Kind {
        /// Which.
        path: PathBuf,
    },
    /// Empty, or a fraction of a block at its end.
    #[error("{} has {size} bytes, which is not a whole number of blocks of {block} bytes (and at least one); resize it, or choose another block-size", path.display())]
    Fraction {
        /// Which.
        path: PathBuf,
        /// In bytes.
        size: u64,
        /// The LBA size.
        block: u64,
    },
    /// Somebody else uses it.
    #[error("{} is in use by another process (a virtual machine, qemu-img, another server); stop it{}", path.display(), if *read_only { "" } else { ", or let both use it read-only" })]
    Locked {
        /// Which.
        path: PathBuf,
        /// What was tried.
        read_only: bool,
    },
    /// No memory.
    #[error("{size} bytes of memory cannot be had: {source}")]
    Memory {
        /// In bytes.
        size: u64,
        /// Why.
        source: io::Error,
    },
    /// Anything else.
    #[error("{} cannot be opened: {source}", path.display())]
    Other {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl FromStr for NamespaceSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (medium, rest) = text.split_once(':').ok_or(SpecError::Medium)?;
        let mut words = rest.split(',');
        let first = words.next().unwrap_or_default();
        let mut spec = Self {
            medium: match medium {
                "null" => Medium::Null { size: parse_size(first)? },
                "ram" => Medium::Ram { size: parse_size(first)? },
                "file" if !first.is_empty() => Medium::File { path: first.into(), engine: None },
                _ => return Err(SpecError::Medium),
            },
            block_shift: 9,
            read_only: false,
        };
        for word in words {
            match (word.split_once('=').unwrap_or((word, "")), &mut spec.medium) {
                (("block-size", "512"), _) => spec.block_shift = 9,
                (("block-size", "4096"), _) => spec.block_shift = 12,
                (("block-size", other), _) => return Err(SpecError::BlockSize(other.into())),
                (("read-only", ""), _) => spec.read_only = true,
                (("engine", "io_uring"), Medium::File { engine, .. }) => *engine = Some(Engine::IoUring),
                (("engine", "threads"), Medium::File { engine, .. }) => *engine = Some(Engine::Threads),
                _ => return Err(SpecError::Option(word.into())),
            }
        }
        if let Medium::Null { size } | Medium::Ram { size } = spec.medium {
            let block = 1 << spec.block_shift;
            if size == 0 || !size.is_multiple_of(block) {
                return Err(SpecError::Fraction { size, block });
            }
        }
        Ok(spec)
    }
}

fn parse_size(text: &str) -> Result<u64, SpecError> {
    let wrong = || SpecError::Size(text.into());
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text.strip_prefix(digits).unwrap_or_default().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|&size| i64::try_from(size).is_ok()).ok_or_else(wrong)
}

impl NamespaceSpec {
    /// Opens the namespace.
    ///
    /// # Errors
    /// [`DiskError`]
    pub fn open<H: PinHost>(&self) -> Result<Backend<H>, DiskError> {
        let geometry = |size: u64| Geometry {
            block_shift: self.block_shift,
            blocks: size >> self.block_shift,
            read_only: self.read_only,
            volatile_cache: false,
            deallocates: true,
        };
        Ok(match &self.medium {
            Medium::Null { size } => {
                Backend::Null(Null::new(Geometry { deallocates: false, ..geometry(*size) }))
            }
            Medium::Ram { size } => Backend::Ram(
                Ram::new(geometry(*size)).map_err(|source| DiskError::Memory { size: *size, source })?,
            ),
            Medium::File { path, engine } => {
                Backend::File(Box::new(File::open(path, self.block_shift, self.read_only, *engine)?))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<NamespaceSpec, SpecError> {
        text.parse()
    }

    #[test]
    fn what_a_namespace_can_be() {
        assert_eq!(
            parse("ram:1G,block-size=4096,read-only").unwrap(),
            NamespaceSpec { medium: Medium::Ram { size: 1 << 30 }, block_shift: 12, read_only: true }
        );
        assert_eq!(
            parse("file:/a/b.img,engine=threads").unwrap(),
            NamespaceSpec {
                medium: Medium::File { path: "/a/b.img".into(), engine: Some(Engine::Threads) },
                block_shift: 9,
                read_only: false
            }
        );
        assert_eq!(parse("null:512").unwrap().medium, Medium::Null { size: 512 });
        assert_eq!(parse("null:3MiB").unwrap().medium, Medium::Null { size: 3 << 20 });
    }

    #[test]
    fn what_it_cannot_be() {
        for (text, error) in [
            ("disk.img", SpecError::Medium),
            ("tape:1G", SpecError::Medium),
            ("file:", SpecError::Medium),
            ("ram:", SpecError::Size("".into())),
            ("ram:-1", SpecError::Size("-1".into())),
            ("ram:9999999T", SpecError::Size("9999999T".into())),
            ("ram:1X", SpecError::Size("1X".into())),
            ("ram:0", SpecError::Fraction { size: 0, block: 512 }),
            ("ram:1000", SpecError::Fraction { size: 1000, block: 512 }),
            ("ram:512,block-size=4096", SpecError::Fraction { size: 512, block: 4096 }),
            ("ram:1M,block-size=1024", SpecError::BlockSize("1024".into())),
            ("ram:1M,fast", SpecError::Option("fast".into())),
            ("ram:1M,engine=threads", SpecError::Option("engine=threads".into())),
            ("file:a,engine=quick", SpecError::Option("engine=quick".into())),
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
    }
}
