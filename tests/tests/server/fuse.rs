//! Memory whose every page another process of the client's may hold back: a file of a FUSE file system.

#![expect(unsafe_code, reason = "mounts a file system")]

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::libc;
use outboard_vfio_user::memory::Access;

use outboard_tests::conformance::{mapping, memory};
use outboard_tests::in_process::open;
use outboard_tests::plain::Plain;

// Operations of FUSE (fuse(4), linux/fuse.h).
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const STATFS: u32 = 17;
const INIT: u32 = 26;

const ROOT: u64 = 1;
const FILE: u64 = 2;

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// struct fuse_attr of the directory, or of the one file in it, with 1 MiB.
fn attributes(node: u64) -> Vec<u8> {
    let (mode, size) = if node == ROOT { (0o040_755, 0) } else { (0o100_666, 1 << 20) };
    let numbers = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0_u32];
    [words(&[node, size, 0, 0, 0, 0]), numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()]
        .concat()
}

/// Answers until it is unmounted. Pages are never read: nobody may map them.
fn serve(mut device: File) {
    let mut request = vec![0; 256 << 10];
    while let Ok(length) = device.read(&mut request) {
        assert!(length >= 40);
        let operation = u32::from_ne_bytes(request[4..8].try_into().unwrap());
        let (unique, node) = (&request[8..16], u64::from_ne_bytes(request[16..24].try_into().unwrap()));
        let body = match operation {
            // Version 7.31, the rest is the kernel's default.
            INIT => Some([&7_u32.to_ne_bytes()[..], &31_u32.to_ne_bytes(), &[0; 56]].concat()),
            LOOKUP => Some([words(&[FILE, 0, 60, 60, 0]), attributes(FILE)].concat()),
            GETATTR => Some([words(&[60, 0]), attributes(node)].concat()),
            OPEN => Some(words(&[0, 0])),
            STATFS => Some(vec![0; 80]),
            FORGET => continue,
            _ => None,
        };
        let error = if body.is_some() { 0 } else { -libc::ENOSYS };
        let body = body.unwrap_or_default();
        let header = [&(16 + body.len() as u32).to_ne_bytes()[..], &error.to_ne_bytes(), unique].concat();
        let _ = device.write(&[header, body].concat());
    }
}

/// A mounted file system, until it is dropped.
struct Mount(CString);

impl Mount {
    /// None where that is not allowed.
    fn new(at: &Path) -> Option<Self> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").ok()?;
        let target = CString::new(at.as_os_str().as_bytes()).unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = CString::new(options).unwrap();
        // SAFETY: mount(2) reads the strings, which outlive the call.
        let result = unsafe {
            let kind = c"fuse".as_ptr();
            libc::mount(
                kind,
                target.as_ptr(),
                kind,
                libc::MS_NOSUID | libc::MS_NODEV,
                options.as_ptr().cast(),
            )
        };
        Errno::result(result).ok()?;
        std::thread::spawn(move || serve(device));
        Some(Self(target))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // SAFETY: umount2(2) reads the string.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}

/// A page fault in it waits for the client, and may keep all threads of this process from mapping anything meanwhile.
#[test]
fn memory_that_a_process_of_the_clients_makes_up_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let Some(_mount) = Mount::new(directory.path()) else {
        return eprintln!("skipped: FUSE cannot be mounted here (needs root and /dev/fuse)");
    };
    let file = OpenOptions::new().read(true).write(true).open(directory.path().join("memory")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    let (mut client, _served) = open(&Plain::new());
    let refused = client.map(&mapping(0, 0x1000, Access::ReadWrite, 0), Some(file.as_fd()));
    assert_eq!(refused.unwrap_err().errno(), Some(Errno::EINVAL as u32));
    let ram = memory(0x1000);
    client.map(&mapping(0, 0x1000, Access::ReadWrite, 0), Some(ram.as_fd())).unwrap();
}
