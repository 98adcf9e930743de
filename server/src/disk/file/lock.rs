//! Locks on images, compatible with QEMU's (block/file-posix.c): whoever opens an image says what it does with
//! it and what it lets others do, by shared locks on single bytes of the file, and then looks whether anybody
//! holds a byte that contradicts. The locks are of the open file description (F_OFD_SETLK).

use std::fs::File;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// Held: the holder has the permission (RAW_LOCK_PERM_BASE).
const HAS: i64 = 100;
/// Held: the holder lets nobody else have the permission (RAW_LOCK_SHARED_BASE).
const KEEPS: i64 = 200;

/// QEMU's block permissions, by bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Permission {
    /// BLK_PERM_CONSISTENT_READ.
    Read = 0,
    /// BLK_PERM_WRITE.
    Write = 1,
    /// BLK_PERM_RESIZE.
    Resize = 3,
}

use Permission::{Read, Resize, Write};

/// Why an image was not locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockError {
    /// Somebody uses it in a way that contradicts.
    Taken,
    /// The file system has no such locks, or none left.
    Impossible(Errno),
}

/// Locks an image for reading, or for reading and writing; others may read what is only read. On an error, locks
/// are left behind: close the file.
pub(super) fn lock(image: &File, read_only: bool) -> Result<(), LockError> {
    let has: &[Permission] = if read_only { &[Read] } else { &[Read, Write] };
    let keeps: &[Permission] = &[Write, Resize];
    let held = has.iter().map(|&p| byte(HAS, p)).chain(keeps.iter().map(|&p| byte(KEEPS, p)));
    for byte in held {
        set(image, libc::F_RDLCK, byte, 1)?;
    }
    let contradictions = has.iter().map(|&p| byte(KEEPS, p)).chain(keeps.iter().map(|&p| byte(HAS, p)));
    for byte in contradictions {
        test(image, byte)?;
    }
    Ok(())
}

/// Gives up all locks of the open file description.
pub(super) fn unlock(image: &File) -> Result<(), LockError> {
    set(image, libc::F_UNLCK, HAS, KEEPS)
}

fn set(image: &File, kind: i32, start: i64, length: i64) -> Result<(), LockError> {
    match fcntl(image, FcntlArg::F_OFD_SETLK(&flock(kind, start, length))) {
        Ok(_) => Ok(()),
        Err(Errno::EAGAIN | Errno::EACCES) => Err(LockError::Taken),
        Err(errno) => Err(LockError::Impossible(errno)),
    }
}

/// Whether nobody else holds the byte.
fn test(image: &File, start: i64) -> Result<(), LockError> {
    let mut found = flock(libc::F_WRLCK, start, 1);
    fcntl(image, FcntlArg::F_OFD_GETLK(&mut found)).map_err(LockError::Impossible)?;
    if i32::from(found.l_type) == libc::F_UNLCK { Ok(()) } else { Err(LockError::Taken) }
}

fn byte(base: i64, permission: Permission) -> i64 {
    base.saturating_add(permission as i64)
}

#[expect(clippy::cast_possible_truncation, reason = "small constants of the C interface")]
fn flock(kind: i32, start: i64, length: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: length,
        l_pid: 0,
    }
}
