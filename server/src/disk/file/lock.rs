//! Image locks as QEMU takes them (block/file-posix.c): open file description locks on single bytes. A byte at
//! 100 + n says "I use permission n", one at 200 + n "nobody else may".

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// RAW_LOCK_PERM_BASE.
const USED: i64 = 100;
/// RAW_LOCK_SHARED_BASE.
const REFUSED: i64 = 200;

/// BLK_PERM_* as bit numbers.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// How long a process that was killed may hold its locks still: the kernel takes its rings apart behind its back,
/// and they refer to the image.
const LINGERING: Duration = Duration::from_secs(2);

/// Locks an image until [`unlock`]: readers share it, a writer has it alone.
///
/// # Errors
/// EAGAIN: another process has a lock that does not go with ours. A file system without locks is no error.
pub(super) fn lock(file: impl AsFd, read_only: bool) -> Result<(), Errno> {
    let start = Instant::now();
    loop {
        match try_lock(&file, read_only) {
            Err(Errno::EAGAIN | Errno::EACCES) if start.elapsed() < LINGERING => {
                unlock(&file);
                thread::sleep(Duration::from_millis(50));
            }
            result => return result,
        }
    }
}

/// Lets go of all locks at once: closing the image is not enough while a ring of ours refers to it.
pub(super) fn unlock(file: impl AsFd) {
    let whole = libc::flock { l_len: 0, ..byte(0, libc::F_UNLCK) };
    if let Err(error) = fcntl(file, FcntlArg::F_OFD_SETLK(&whole)) {
        tracing::debug!(%error, "the image's locks stay until it is closed");
    }
}

fn try_lock(file: impl AsFd, read_only: bool) -> Result<(), Errno> {
    let used: &'static [i64] = if read_only { &[CONSISTENT_READ] } else { &[CONSISTENT_READ, WRITE] };
    // A writer elsewhere would change what we read; nobody may change the size.
    let refused: &'static [i64] = &[WRITE, RESIZE];
    let place = |base: i64, bits: &'static [i64]| bits.iter().map(move |bit| base.saturating_add(*bit));
    for at in place(USED, used).chain(place(REFUSED, refused)) {
        match fcntl(&file, FcntlArg::F_OFD_SETLK(&byte(at, libc::F_RDLCK))) {
            Ok(_) => {}
            Err(Errno::EINVAL | Errno::ENOLCK | Errno::EOPNOTSUPP) => {
                tracing::warn!("the file system has no locks: nothing keeps others from this image");
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
    // Ours stand, so that of two that start together at most one goes on; now look for others'.
    for at in place(REFUSED, used).chain(place(USED, refused)) {
        let mut probe = byte(at, libc::F_WRLCK);
        fcntl(&file, FcntlArg::F_OFD_GETLK(&mut probe))?;
        if i32::from(probe.l_type) != libc::F_UNLCK {
            return Err(Errno::EAGAIN);
        }
    }
    Ok(())
}

fn byte(place: i64, kind: i32) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or(0),
        l_whence: 0, // SEEK_SET
        l_start: place,
        l_len: 1,
        l_pid: 0,
    }
}
