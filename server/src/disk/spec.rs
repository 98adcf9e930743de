//! Namespaces as the user writes them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::file::{self, EngineKind, OpenError};
use super::null::NullDisk;
use super::ram::RamDisk;
use super::{Backend, PinHost, Storage};

/// A namespace as it is written on the command line: `KIND:WHAT[,KEY=VALUE]…`.
///
/// ```
/// use outboard_server::disk::NamespaceSpec;
/// let spec: NamespaceSpec = "file:disk.img,block-size=4096,read-only".parse()?;
/// assert!(spec.read_only);
/// # Ok::<(), outboard_server::disk::SpecError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// Where the blocks are.
    pub source: Source,
    /// log2 of the block's bytes: 9 or 12.
    pub block_shift: u32,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// Where a namespace's blocks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nowhere.
    Null {
        /// In bytes.
        size: u64,
    },
    /// In the server's memory.
    Ram {
        /// In bytes.
        size: u64,
    },
    /// In a file or on a block device.
    File {
        /// Which.
        path: PathBuf,
        /// How it is read and written; unless said, the best that the kernel allows.
        engine: Option<EngineKind>,
    },
}

/// What is wrong with how a namespace is written, and how it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// No `KIND:`, or an unknown one.
    #[error("Unknown namespace '{0}': write file:PATH, ram:SIZE or null:SIZE")]
    Kind(String),
    /// `file:` and nothing.
    #[error("No path after 'file:': write file:PATH")]
    NoPath,
    /// Not a size.
    #[error("'{0}' is not a size: write a number of bytes, or one with K, M, G or T, as in 512M")]
    Size(String),
    /// A size of 0.
    #[error("A namespace cannot have size 0: write a size such as 512M")]
    Zero,
    /// More than fits.
    #[error("Size '{0}' is too big: at most 8191P can be addressed")]
    TooBig(String),
    /// Not a multiple of the block.
    #[error("Size {size} is not a multiple of the block of {block} bytes: write {}", size.next_multiple_of(*block))]
    Fraction {
        /// In bytes.
        size: u64,
        /// In bytes.
        block: u64,
    },
    /// An unknown key.
    #[error("Unknown key '{0}': {KEYS} (a comma in a path is written twice)")]
    Key(String),
    /// The same key again.
    #[error("'{0}' is given twice: write it once")]
    Twice(&'static str),
    /// A key with a wrong value, or with none.
    #[error("'{key}={value}' is not possible: write {key}={expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// What was given.
        value: String,
        /// What can be given.
        expected: &'static str,
    },
    /// A key that belongs to files.
    #[error("'engine' is for files: leave it out")]
    EngineWithoutFile,
}

const KEYS: &str = "keys are block-size, read-only and engine";

impl NamespaceSpec {
    /// With a relative path starting at `directory`.
    #[must_use]
    pub(crate) fn inside(mut self, directory: &Path) -> Self {
        if let Source::File { path, .. } = &mut self.source {
            *path = directory.join(&path);
        }
        self
    }

    /// Opens the storage.
    ///
    /// # Errors
    /// What is wrong with the image, and what to do about it.
    pub fn open<H: PinHost>(&self) -> Result<Backend<H>, OpenError> {
        let NamespaceSpec { ref source, block_shift, read_only } = *self;
        match *source {
            Source::Null { size } => {
                let blocks = size.checked_shr(block_shift).unwrap_or(0);
                Ok(Backend(Storage::Null(NullDisk::new(block_shift, blocks, read_only))))
            }
            Source::Ram { size } => RamDisk::new(block_shift, size, read_only)
                .map(|disk| Backend(Storage::Ram(disk)))
                .map_err(|errno| OpenError::Memory { size, errno }),
            Source::File { ref path, engine } => {
                file::open(path, block_shift, read_only, engine).map(Backend)
            }
        }
    }
}

impl FromStr for NamespaceSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<NamespaceSpec, SpecError> {
        let (kind, rest) = text.split_once(':').ok_or_else(|| SpecError::Kind(text.into()))?;
        let mut parts = split(rest).into_iter();
        let what = parts.next().unwrap_or_default();
        let mut keys = Keys::default();
        for part in parts {
            keys.set(&part)?;
        }
        let block_shift = keys.block_shift.unwrap_or(9);
        let source = match kind {
            "null" => Source::Null { size: size(&what, block_shift)? },
            "ram" => Source::Ram { size: size(&what, block_shift)? },
            "file" if what.is_empty() => return Err(SpecError::NoPath),
            "file" => Source::File { path: what.into(), engine: keys.engine },
            _ => return Err(SpecError::Kind(text.into())),
        };
        if keys.engine.is_some() && !matches!(source, Source::File { .. }) {
            return Err(SpecError::EngineWithoutFile);
        }
        Ok(NamespaceSpec { source, block_shift, read_only: keys.read_only.unwrap_or(false) })
    }
}

/// As it would be parsed.
impl fmt::Display for NamespaceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut file_engine = None;
        match &self.source {
            Source::Null { size } => write!(f, "null:{size}")?,
            Source::Ram { size } => write!(f, "ram:{size}")?,
            Source::File { path, engine } => {
                write!(f, "file:{}", path.display().to_string().replace(',', ",,"))?;
                file_engine = *engine;
            }
        }
        if self.block_shift != 9 {
            write!(f, ",block-size={}", 1u64.checked_shl(self.block_shift).unwrap_or(0))?;
        }
        if self.read_only {
            f.write_str(",read-only")?;
        }
        match file_engine {
            Some(EngineKind::IoUring) => f.write_str(",engine=io_uring"),
            Some(EngineKind::Threads) => f.write_str(",engine=threads"),
            None => Ok(()),
        }
    }
}

/// The keys that were given.
#[derive(Default)]
struct Keys {
    block_shift: Option<u32>,
    read_only: Option<bool>,
    engine: Option<EngineKind>,
}

impl Keys {
    fn set(&mut self, part: &str) -> Result<(), SpecError> {
        let (key, value) = match part.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (part, None),
        };
        let wrong = |key, expected| SpecError::Value { key, value: value.unwrap_or("").into(), expected };
        match key {
            "block-size" => {
                let shift = match value {
                    Some("512") => 9,
                    Some("4096" | "4K" | "4k") => 12,
                    _ => return Err(wrong("block-size", "512 or block-size=4096")),
                };
                once("block-size", &mut self.block_shift, shift)
            }
            "read-only" => {
                let read_only = match value {
                    None | Some("on" | "true") => true,
                    Some("off" | "false") => false,
                    _ => return Err(wrong("read-only", "on or read-only=off")),
                };
                once("read-only", &mut self.read_only, read_only)
            }
            "engine" => {
                let engine = match value {
                    Some("io_uring") => EngineKind::IoUring,
                    Some("threads") => EngineKind::Threads,
                    _ => return Err(wrong("engine", "io_uring or engine=threads")),
                };
                once("engine", &mut self.engine, engine)
            }
            _ => Err(SpecError::Key(key.into())),
        }
    }
}

fn once<T>(key: &'static str, place: &mut Option<T>, value: T) -> Result<(), SpecError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(SpecError::Twice(key)),
    }
}

/// Splits at commas; two together stand for one that separates nothing, as in QEMU's options.
fn split(text: &str) -> Vec<String> {
    let mut parts = Vec::new();
    let mut part = String::new();
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            ',' if characters.next_if_eq(&',').is_some() => part.push(','),
            ',' => parts.push(std::mem::take(&mut part)),
            _ => part.push(character),
        }
    }
    parts.push(part);
    parts
}

/// Bytes, or a multiple of a power of 1024.
fn size(text: &str, block_shift: u32) -> Result<u64, SpecError> {
    let wrong = || SpecError::Size(text.into());
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text.strip_prefix(digits).unwrap_or_default().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return Err(wrong()),
    };
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(wrong());
    }
    let unit = 1u64.checked_shl(shift).unwrap_or(u64::MAX);
    let size = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    // The kernel's file offsets are signed, and so are ours.
    let size =
        size.filter(|&size| i64::try_from(size).is_ok()).ok_or_else(|| SpecError::TooBig(text.into()))?;
    let block = 1u64.checked_shl(block_shift).unwrap_or(u64::MAX);
    match size {
        0 => Err(SpecError::Zero),
        _ if !size.is_multiple_of(block) => Err(SpecError::Fraction { size, block }),
        _ => Ok(size),
    }
}
