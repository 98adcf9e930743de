//! Descriptors that this process has no room for. It lowers the process's limit, so it is alone in its binary.

#![expect(unsafe_code, reason = "sets a resource limit")]

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::libc;
use outboard_vfio_user::transport::{Received, Socket};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn descriptors_without_room_are_an_error_and_do_not_leak() {
    let (left, right) = UnixStream::pair().unwrap();
    let (left, right) = (Socket::new(left).unwrap(), Socket::new(right).unwrap());
    let file = tempfile::tempfile().unwrap();
    let before = open_descriptors();
    // The directory that was being read counted itself.
    let limit = libc::rlimit { rlim_cur: before as u64 + 2, rlim_max: before as u64 + 2 };
    // SAFETY: the structure is whole, and the limit is this process's own.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    assert_eq!(left.send(&[1], &[file.as_fd(); 10]).unwrap(), Some(1));
    let error = right.receive(&mut [0; 16]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
    assert_eq!(open_descriptors(), before);
    assert_eq!(left.send(&[2], &[file.as_fd()]).unwrap(), Some(1));
    assert!(matches!(right.receive(&mut [0; 16]).unwrap(), Received::Data { length: 1, .. }));
}
