//! Opening an image: what is wrong with it, what it can do.
#![expect(unsafe_code, reason = "statx, and a trial read into aligned memory")]

use std::ffi::CStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};
use nix::libc;
use nix::sys::stat::{major, minor};
use nix::unistd::fdatasync;
use outboard_nvme::controller::Geometry;

use super::buffers::Alignment;
use super::lock::{self, LockError};
use super::plan::{Cache, Support, Traits};
use crate::disk::lba_formats;
use crate::disk::limits::LOCK_WAIT;

/// Why an image cannot be used, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// ENOENT.
    #[error("No image {path}: create it, for example with `truncate -s 10G {path}`", path = path.display())]
    Missing {
        /// The image.
        path: PathBuf,
    },
    /// Not a file or block device.
    #[error("{path} is a {what}: name an image file or a block device", path = path.display())]
    NotAnImage {
        /// The image.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// EACCES for reading.
    #[error("No permission to read {path}: give this user access to it", path = path.display())]
    Unreadable {
        /// The image.
        path: PathBuf,
    },
    /// EACCES, EPERM or EROFS for writing.
    #[error("{path} may not be written ({errno}): add `read-only`, or give this user access to it", path = path.display())]
    Unwritable {
        /// The image.
        path: PathBuf,
        /// The kernel's reason.
        errno: Errno,
    },
    /// Size 0.
    #[error("{path} is empty: give it a size, for example with `truncate -s 10G {path}`", path = path.display())]
    Empty {
        /// The image.
        path: PathBuf,
    },
    /// The size is not a multiple of the block.
    #[error(
        "{path} has {size} bytes, not a multiple of block-size={block}: \
         lengthen it with `truncate -s {suggestion} {path}`{hint}",
        path = path.display()
    )]
    Fraction {
        /// The image.
        path: PathBuf,
        /// Its bytes.
        size: u64,
        /// The bytes of a block.
        block: u64,
        /// The next multiple.
        suggestion: u64,
        /// Another way out.
        hint: &'static str,
    },
    /// Another process uses it.
    #[error("{path} is in use by {holder}: {advice}", path = path.display())]
    Locked {
        /// The image.
        path: PathBuf,
        /// Who uses it, if that can be known.
        holder: Holder,
        /// What to do.
        advice: &'static str,
    },
    /// `engine=io_uring`, and the kernel refuses.
    #[error("The kernel refuses io_uring for {path} ({error}): leave `engine` out, or set it to `threads`", path = path.display())]
    IoUring {
        /// The image.
        path: PathBuf,
        /// The kernel's reason.
        error: io::Error,
    },
    /// No threads.
    #[error("No threads for {path} ({error}): raise the limits of processes and descriptors", path = path.display())]
    Threads {
        /// The image.
        path: PathBuf,
        /// The kernel's reason.
        error: io::Error,
    },
    /// No memory of that size.
    #[error("No {size} bytes of memory for a ram namespace ({errno}): make it smaller")]
    Memory {
        /// In bytes.
        size: u64,
        /// The kernel's reason.
        errno: Errno,
    },
    /// Anything else.
    #[error("{path}: {error}", path = path.display())]
    Other {
        /// The image.
        path: PathBuf,
        /// The kernel's reason.
        error: io::Error,
    },
}

/// The process that uses an image, if it could be found.
#[derive(Debug)]
pub struct Holder(Option<(String, String)>);

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Some((pid, name)) => write!(f, "{name} (process {pid})"),
            None => f.write_str("another process"),
        }
    }
}

/// Whether the page cache is to be avoided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Caching {
    /// Where the file allows it.
    Direct,
    /// It is not.
    #[cfg_attr(not(test), expect(dead_code, reason = "files without direct I/O are rare where tests run"))]
    Buffered,
}

/// An open image, locked until it is dropped.
pub(super) struct Image {
    file: File,
    /// Whether it may have been written.
    written: bool,
}

impl AsFd for Image {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Image {
    /// What was written is made durable when the server ends. Closing the last descriptor would unlock the image,
    /// too, but a ring lets go of its file only some time after it was closed.
    fn drop(&mut self) {
        if self.written
            && let Err(error) = fdatasync(&self.file)
        {
            tracing::error!(%error, "An image could not be flushed at the end");
        }
        if let Err(error) = lock::unlock(&self.file) {
            tracing::warn!(?error, "An image stays locked until its file is closed");
        }
    }
}

/// What opening finds.
pub(super) struct Opened {
    pub(super) image: Arc<Image>,
    pub(super) geometry: Geometry,
    pub(super) traits: Traits,
}

impl Opened {
    pub(super) fn new(
        path: &Path,
        block_shift: u32,
        read_only: bool,
        caching: Caching,
    ) -> Result<Opened, OpenError> {
        let other = |error| OpenError::Other { path: path.into(), error };
        // Before it is opened: opening a FIFO or a tape has effects.
        let metadata = std::fs::metadata(path).map_err(|error| access_error(path, &error, true))?;
        kind(path, &metadata)?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags((OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits())
            .open(path)
            .map_err(|error| access_error(path, &error, read_only))?;
        let metadata = file.metadata().map_err(other)?;
        kind(path, &metadata)?;
        let size = file.seek(SeekFrom::End(0)).map_err(other)?;
        let block = 1u64.checked_shl(block_shift).unwrap_or(u64::MAX);
        if size == 0 {
            return Err(OpenError::Empty { path: path.into() });
        }
        if !size.is_multiple_of(block) {
            return Err(OpenError::Fraction {
                path: path.into(),
                size,
                block,
                suggestion: size.next_multiple_of(block),
                hint: if size.is_multiple_of(512) { ", or use `block-size=512`" } else { "" },
            });
        }
        take(path, &file, &metadata, read_only)?;
        let alignment = match caching {
            Caching::Direct => make_direct(&file, block).unwrap_or(Alignment::Any),
            Caching::Buffered => Alignment::Any,
        };
        let smallest = match alignment {
            Alignment::Any => 0,
            Alignment::Direct { length, .. } => length.trailing_zeros(),
        };
        // A device whose own blocks are bigger (so that there is no direct I/O) takes back only whole ones.
        let small = metadata.file_type().is_block_device() && alignment == Alignment::Any;
        let deallocates = !read_only && !small && punches(&file, &metadata, size);
        tracing::info!(path = %path.display(), size, block, ?alignment, deallocates, read_only, "Opened an image");
        Ok(Opened {
            image: Arc::new(Image { file, written: !read_only }),
            geometry: Geometry {
                block_shift,
                formats: lba_formats(smallest, size),
                blocks: size.checked_shr(block_shift).unwrap_or(0),
                read_only,
                volatile_cache: !read_only,
                deallocates,
            },
            traits: Traits { alignment, zero_range: Support::Present, cache: Cache::Sound },
        })
    }
}

/// Refuses what cannot be an image.
fn kind(path: &Path, metadata: &Metadata) -> Result<(), OpenError> {
    let kind = metadata.file_type();
    let what = match () {
        () if kind.is_file() || kind.is_block_device() => return Ok(()),
        () if kind.is_dir() => "directory",
        () if kind.is_fifo() => "named pipe",
        () if kind.is_socket() => "socket",
        () => "character device",
    };
    Err(OpenError::NotAnImage { path: path.into(), what })
}

fn access_error(path: &Path, error: &io::Error, read_only: bool) -> OpenError {
    let path = path.to_path_buf();
    let errno = Errno::from_raw(error.raw_os_error().unwrap_or(0));
    match errno {
        Errno::ENOENT => OpenError::Missing { path },
        Errno::EROFS => OpenError::Unwritable { path, errno },
        Errno::EACCES | Errno::EPERM if read_only => OpenError::Unreadable { path },
        Errno::EACCES | Errno::EPERM => OpenError::Unwritable { path, errno },
        _ => OpenError::Other { path, error: errno.into() },
    }
}

/// Locks the image, unless its file system knows no locks.
fn take(path: &Path, file: &File, metadata: &Metadata, read_only: bool) -> Result<(), OpenError> {
    let until = Instant::now().checked_add(LOCK_WAIT);
    loop {
        match lock::lock(file, read_only) {
            Ok(()) => return Ok(()),
            Err(LockError::Taken) if until.is_some_and(|until| Instant::now() < until) => {
                thread::sleep(Duration::from_millis(20));
            }
            Err(LockError::Taken) => {
                let advice = if read_only {
                    "stop that, or have it open the image read-only, too"
                } else {
                    "stop that, or open the image `read-only` in both"
                };
                return Err(OpenError::Locked { path: path.into(), holder: holder(metadata), advice });
            }
            Err(LockError::Impossible(errno)) => {
                tracing::warn!(path = %path.display(), %errno, "The image cannot be locked: nothing keeps others from writing to it");
                return Ok(());
            }
        }
    }
}

/// A process that has the file open. A lock of an open file description names none, so this is a search, and
/// finds only what this user may look at.
fn holder(metadata: &Metadata) -> Holder {
    let same = |path: &Path| {
        std::fs::metadata(path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (metadata.dev(), metadata.ino()))
    };
    let ours = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let found = processes.filter_map(|process| {
        let pid = process.file_name().into_string().ok().filter(|pid| pid.parse::<u32>().is_ok())?;
        let mut files = std::fs::read_dir(process.path().join("fd")).ok()?.flatten();
        let uses = pid != ours && files.any(|file| same(&file.path()));
        let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        uses.then(|| (pid, name.trim_end().to_owned()))
    });
    Holder(found.into_iter().next())
}

/// Turns the page cache off, if the file can be read that way by the `block`, and says what it asks for.
fn make_direct(file: &File, block: u64) -> Option<Alignment> {
    let block = usize::try_from(block).ok()?;
    let (memory, length) = match direct_alignment(file) {
        Some((memory, offset)) => {
            let powers = memory.is_power_of_two() && offset.is_power_of_two();
            if !powers || !block.is_multiple_of(offset) {
                return None;
            }
            (memory, offset)
        }
        // Not told: a page suits every medium, and so do our blocks if the trial does.
        None => (4096, block),
    };
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL).ok()?);
    fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT)).ok()?;
    if trial_read(file, length) {
        return Some(Alignment::Direct { memory, length });
    }
    if let Err(error) = fcntl(file, FcntlArg::F_SETFL(flags)) {
        tracing::warn!(%error, "Direct I/O stays on");
    }
    None
}

/// The alignment of memory and of offsets in direct I/O (STATX_DIOALIGN, Linux 6.1), 0 if there is none.
fn direct_alignment(file: &File) -> Option<(usize, usize)> {
    const SELF: &CStr = c"";
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is a string, and the kernel fills in at most one statx structure.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            SELF.as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            found.as_mut_ptr(),
        )
    };
    Errno::result(result).ok()?;
    // SAFETY: integers only, zeroed at first.
    let found = unsafe { found.assume_init() };
    if found.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    let number = |value: u32| usize::try_from(value).ok();
    Some((number(found.stx_dio_mem_align)?, number(found.stx_dio_offset_align)?))
}

/// Whether a block can be read at the file's beginning with the flags as they are.
fn trial_read(file: &File, length: usize) -> bool {
    #[repr(C, align(4096))]
    struct Block([u8; 4096]);
    let mut block = Box::new(Block([0; 4096]));
    let length = length.min(block.0.len());
    // SAFETY: the buffer has at least `length` bytes and is borrowed exclusively.
    let result = unsafe { libc::pread(file.as_raw_fd(), block.0.as_mut_ptr().cast(), length, 0) };
    usize::try_from(result) == Ok(length)
}

/// Whether space can be given back, so that it reads as zeroes.
fn punches(file: &File, metadata: &Metadata, size: u64) -> bool {
    if metadata.file_type().is_block_device() {
        // A partition's queue is its parent's.
        let device = format!("/sys/dev/block/{}:{}", major(metadata.rdev()), minor(metadata.rdev()));
        return ["queue", "../queue"].iter().any(|queue| {
            let limit = std::fs::read_to_string(format!("{device}/{queue}/write_zeroes_max_bytes"));
            limit.is_ok_and(|limit| limit.trim().parse::<u64>().is_ok_and(|limit| limit > 0))
        });
    }
    // Behind the end, where nothing can be lost.
    let Ok(end) = i64::try_from(size) else { return false };
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, mode, end, 4096).is_ok()
}
