//! Image locks as QEMU takes them (block/file-posix.c): open file description locks on single bytes. A byte at
//! 100 + n says "I use permission n", one at 200 + n "nobody else may".

use std::os::fd::AsFd;

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

/// Locks an image for as long as its open file description lives: readers share it, a writer has it alone.
///
/// # Errors
/// EAGAIN: another process has a lock that does not go with ours. A file system without locks is no error.
pub(super) fn lock(file: impl AsFd, read_only: bool) -> Result<(), Errno> {
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
