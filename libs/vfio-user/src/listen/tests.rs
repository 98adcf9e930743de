use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::PermissionsExt;
use std::sync::Barrier;
use std::thread;

use nix::sys::eventfd::EventFd;
use nix::unistd::Uid;
use outboard_pci::{BarIndex, Builder, Identity};

use super::*;
use crate::client::{Client, Options};
use crate::function::{Function, Registers};

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

/// Whatever the umask is; and nobody may connect before the file has its permissions.
#[test]
fn who_may_connect_is_what_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    for mode in [0o600, 0o660, 0o666] {
        for stale in [false, true] {
            if stale {
                drop(UnixListener::bind(&path).unwrap());
            }
            let _ours = Source::bind_as(&path, Some(mode)).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
            assert!(UnixStream::connect(&path).is_ok());
        }
    }
}

#[test]
fn a_socket_that_took_our_place_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let ours = Source::bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    drop(ours);
    assert!(path.exists());
}

/// Of servers that find the same stale file at the same time, one listens, and its file stays.
#[test]
fn a_stale_socket_has_one_successor() {
    let directory = tempfile::tempdir().unwrap();
    for round in 0..100 {
        let path = directory.path().join(round.to_string());
        drop(UnixListener::bind(&path).unwrap());
        let start = Barrier::new(4);
        let bind = || {
            start.wait();
            Source::bind(&path)
        };
        let results: Vec<_> = thread::scope(|scope| {
            let all: Vec<_> = (0..4).map(|_| scope.spawn(bind)).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let errors: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
        assert_eq!(errors.len(), 3, "round {round}: {errors:?}");
        assert!(errors.iter().all(|error| matches!(error, ListenError::InUse { .. })), "{errors:?}");
        assert!(UnixStream::connect(&path).is_ok(), "round {round}");
    }
}

/// A server that ends does not take the file of the next one with it, however early that one comes.
#[test]
fn the_next_server_keeps_its_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let mut current = Source::bind(&path).unwrap();
    for round in 0..1000 {
        let next = thread::scope(|scope| {
            let next = scope.spawn(|| {
                loop {
                    match Source::bind(&path) {
                        Ok(source) => return source,
                        Err(ListenError::InUse { .. }) => thread::yield_now(),
                        Err(error) => panic!("round {round}: {error}"),
                    }
                }
            });
            drop(current);
            next.join().unwrap()
        });
        assert!(UnixStream::connect(&path).is_ok(), "round {round}");
        current = next;
    }
}

/// A server that is asked whether it lives sees no client.
#[test]
fn asking_is_no_connection() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let live = UnixListener::bind(&path).unwrap();
    live.set_nonblocking(true).unwrap();
    assert!(matches!(Source::bind(&path), Err(ListenError::InUse { .. })));
    assert_eq!(live.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn the_longest_path_is_good() {
    let directory = tempfile::tempdir().unwrap();
    let room = PATH_MAX - directory.path().as_os_str().len() - 1;
    assert!(Source::bind(&directory.path().join("x".repeat(room))).is_ok());
    let longer = directory.path().join("x".repeat(room + 1));
    assert!(matches!(Source::bind(&longer), Err(ListenError::TooLong { length: 108 })));
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
    assert!(matches!(Source::inherited(listener.into_raw_fd()), Ok(Source::Listener { file: None, .. })));
    let (stream, _peer) = UnixStream::pair().unwrap();
    assert!(matches!(Source::inherited(stream.into_raw_fd()), Ok(Source::Client(_))));
    let (datagram, _peer) = std::os::unix::net::UnixDatagram::pair().unwrap();
    assert!(Source::inherited(datagram.into_raw_fd()).is_err());
    let file = tempfile::tempfile().unwrap();
    assert!(Source::inherited(file.as_raw_fd().saturating_add(500)).is_err());
    assert!(Source::inherited(file.into_raw_fd()).is_err());
    assert!(Source::inherited(0).is_err());
}

#[test]
fn without_permission_nothing_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let stale = directory.path().join("stale");
    drop(UnixListener::bind(&stale).unwrap());
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o555)).unwrap();
    // Root may do anything; so this thread is somebody else, as far as files go.
    let bind = |path: &Path| {
        nix::unistd::setfsuid(Uid::from_raw(65534));
        Source::bind(path)
    };
    for path in [directory.path().join("new"), stale.clone()] {
        let result = thread::scope(|scope| scope.spawn(|| bind(&path)).join().unwrap());
        assert!(matches!(result, Err(ListenError::Permission { .. })), "{path:?}: {result:?}");
    }
    assert!(stale.exists());
}

fn nothing() -> Function<impl Registers> {
    struct Nothing;
    impl Registers for Nothing {
        fn read(&mut self, _: BarIndex, _: u64, _: &mut [u8]) {}
        fn write(&mut self, _: BarIndex, _: u64, _: &[u8]) {}
        fn reset(&mut self) {}
        fn interrupt(&self) -> bool {
            false
        }
    }
    let identity =
        Identity { vendor: 1, device: 2, subsystem_vendor: 0, subsystem: 0, class: [0; 3], revision: 0 };
    Function::new(Builder::new(identity).build(), Nothing)
}

#[test]
fn clients_are_served_in_turn_until_it_is_enough() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (source, device, stop) = (Source::bind(&path).unwrap(), nothing(), EventFd::new().unwrap());
    let connect = || Client::connect(&path, Options::default()).unwrap();
    thread::scope(|scope| {
        let program = scope.spawn(|| source.serve(&device, &Arc::default(), &stop));
        drop(connect());
        let first = connect();
        let second = scope.spawn(connect);
        thread::sleep(Duration::from_millis(50));
        assert!(!second.is_finished(), "it waits");
        drop(first);
        let second = second.join().unwrap();
        second.device_info().unwrap();
        stop.write(1).unwrap();
        program.join().unwrap().unwrap();
        assert!(second.device_info().is_err(), "its session was ended");
    });
    assert!(!path.exists());
}

#[test]
fn a_connected_descriptor_is_served_until_its_client_leaves() {
    for told_to_stop in [false, true] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (source, device, stop) = (Source::Client(theirs), nothing(), EventFd::new().unwrap());
        thread::scope(|scope| {
            let program = scope.spawn(|| source.serve(&device, &Arc::default(), &stop));
            let client = Client::new(ours, Options::default()).unwrap();
            client.device_info().unwrap();
            if told_to_stop {
                stop.write(1).unwrap();
            } else {
                client.close();
            }
            program.join().unwrap().unwrap();
        });
    }
}
