//! A device that is served in this process, on a thread of its own.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use outboard_vfio_user::counters::Messages;
use outboard_vfio_user::device::Device;
use outboard_vfio_user::server::{ServeError, serve};
use outboard_vfio_user::wire::{Command, Version};

use crate::conformance::Client;

/// Longer than anything may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A session that is being served.
pub struct Served {
    thread: JoinHandle<Result<(), ServeError>>,
    /// What crosses the socket.
    pub messages: Arc<Messages>,
}

impl Served {
    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Why it ended; soon, since there is cause to.
    ///
    /// # Errors
    /// As [`serve`].
    ///
    /// # Panics
    /// If it does not end, or the session panicked.
    pub fn outcome(self) -> Result<(), ServeError> {
        self.outcome_within(PATIENCE)
    }

    /// Why it ended, which takes a while.
    ///
    /// # Errors
    /// As [`serve`].
    ///
    /// # Panics
    /// If it does not end, or the session panicked.
    pub fn outcome_within(self, patience: Duration) -> Result<(), ServeError> {
        within(patience, "the session ends", || self.thread.is_finished());
        self.thread.join().expect("the session does not panic")
    }
}

/// Waits until it is `done`.
///
/// # Panics
/// If it does not come to that within 10 s.
pub fn eventually(what: &str, done: impl FnMut() -> bool) {
    within(PATIENCE, what, done);
}

fn within(patience: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < patience, "{what}: not after {patience:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Serves a device to whoever has the other end of the stream.
pub fn serve_at<D: Device + 'static>(stream: UnixStream, device: &Arc<D>) -> Served {
    let messages = Arc::new(Messages::default());
    let thread = thread::spawn({
        let (device, messages) = (device.clone(), messages.clone());
        move || serve(stream, &*device, &messages)
    });
    Served { thread, messages }
}

/// A client that has not said a word, and its server.
///
/// # Panics
/// When there are no more sockets.
pub fn connect<D: Device + 'static>(device: &Arc<D>) -> (Client, Served) {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    (Client::new(ours).expect("a client"), serve_at(theirs, device))
}

/// A client past VERSION.
///
/// # Panics
/// When the server does not go along.
pub fn open<D: Device + 'static>(device: &Arc<D>) -> (Client, Served) {
    open_with(device, &Version::proposal())
}

/// A client past VERSION, with capabilities of its own.
///
/// # Panics
/// When the server does not go along.
pub fn open_with<D: Device + 'static>(device: &Arc<D>, version: &Version) -> (Client, Served) {
    let (mut client, served) = connect(device);
    client.call(&Command::Version(version.clone()), &[]).expect("a version in common");
    (client, served)
}
