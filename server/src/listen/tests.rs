use std::os::fd::{AsRawFd, IntoRawFd};

use super::*;

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    // A listener that is gone without removing its file.
    drop(UnixListener::bind(&path).unwrap());
    let ours = Source::bind(&path).unwrap();
    assert!(matches!(Source::bind(&path), Err(ListenError::InUse { .. })));
    assert!(UnixStream::connect(&path).is_ok());
    drop(ours);
    assert!(!path.exists(), "it goes with its server");
}

#[test]
fn a_socket_that_took_our_place_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let ours = Source::bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    // Kept alive together, so that the two cannot have the same inode.
    let other = UnixListener::bind(&path).unwrap();
    let same = fs::symlink_metadata(&path).unwrap().ino()
        == match &ours {
            Source::Listener(_, Some(file)) => file.inode.1,
            _ => unreachable!(),
        };
    drop(ours);
    assert!(same || path.exists());
    drop(other);
}

#[test]
fn what_is_not_a_socket_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, "precious").unwrap();
    assert!(matches!(Source::bind(&path), Err(ListenError::NotASocket { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"precious");
}

#[test]
fn mistakes_have_their_own_errors() {
    let directory = tempfile::tempdir().unwrap();
    let long = directory.path().join("x".repeat(108));
    assert!(matches!(Source::bind(&long), Err(ListenError::TooLong { .. })));
    let nowhere = directory.path().join("no/such/directory");
    assert!(matches!(Source::bind(&nowhere), Err(ListenError::NoDirectory { .. })));
}

#[test]
fn an_inherited_descriptor_listens_is_connected_or_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("s")).unwrap();
    assert!(matches!(Source::inherited(listener.into_raw_fd()), Ok(Source::Listener(_, None))));
    let (stream, _peer) = UnixStream::pair().unwrap();
    assert!(matches!(Source::inherited(stream.into_raw_fd()), Ok(Source::Client(_))));
    let (datagram, _peer) = std::os::unix::net::UnixDatagram::pair().unwrap();
    assert!(Source::inherited(datagram.into_raw_fd()).is_err());
    let file = tempfile::tempfile().unwrap();
    assert!(Source::inherited(file.as_raw_fd().saturating_add(500)).is_err());
    assert!(Source::inherited(file.into_raw_fd()).is_err());
    assert!(Source::inherited(0).is_err());
}
