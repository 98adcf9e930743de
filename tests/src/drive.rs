//! Our drive in this process, and clients of it.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use outboard_server::control::Service;
use outboard_server::nvme::Drive;
use outboard_vfio_user::client::{self, Client};

/// The region of the configuration space.
const CONFIG: u32 = 7;
/// Capabilities Pointer (PCI Local Bus 3.0, section 6.7).
const CAPABILITIES: u64 = 0x34;

/// A client's end of a connection, and the thread that serves the other end until the client leaves.
pub fn stream(server: &Arc<Drive>) -> (UnixStream, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let server = server.clone();
    (ours, thread::spawn(move || server.serve(theirs)))
}

/// As [`stream`], with our client.
pub fn connect(server: &Arc<Drive>) -> (Arc<Client>, JoinHandle<()>) {
    let (stream, session) = stream(server);
    (Arc::new(Client::new(stream, client::Options::default()).expect("a client")), session)
}

/// Where the capability with this identifier is in the configuration space, which has one.
pub fn capability(client: &Client, id: u8) -> u64 {
    let read = |offset: u64| {
        let mut byte = [0];
        client.region_read(CONFIG, offset, &mut byte).expect("configuration space");
        byte[0]
    };
    let mut at = read(CAPABILITIES);
    while read(at.into()) != id {
        assert_ne!(at, 0, "no capability {id:#x}");
        at = read(u64::from(at) + 1);
    }
    at.into()
}
