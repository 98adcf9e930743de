//! The control plane: clients come and go, signals arrive. One thread, on tokio; no data passes here.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use outboard_vfio_user::listen::Source;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How long a client that connects waits for one that hung up to be cleaned up after. QEMU waits 5 s for a reply.
const TAKEOVER: Duration = Duration::from_secs(4);
/// How long a session may take to end when it is told to.
const PARTING: Duration = Duration::from_secs(5);

/// What is served.
pub trait Service: Send + Sync + 'static {
    /// Serves one client until it leaves. Blocks; shutting the stream down ends it.
    fn serve(&self, stream: UnixStream);

    /// Finishes what is under way and makes it durable.
    fn stop(&self);

    /// The counters, a line each.
    fn report(&self) -> String;
}

/// A session under way.
struct Session {
    stream: UnixStream,
    over: oneshot::Receiver<()>,
}

impl Session {
    fn start(service: &Arc<impl Service>, stream: UnixStream) -> io::Result<Self> {
        // Tokio's accepted streams do not block; the session decides for itself.
        stream.set_nonblocking(false)?;
        let (done, over) = oneshot::channel();
        let (service, theirs) = (service.clone(), stream.try_clone()?);
        std::thread::Builder::new().name("session".into()).spawn(move || {
            service.serve(theirs);
            // An error: the server is ending, and waits no more.
            let _ = done.send(());
        })?;
        Ok(Self { stream, over })
    }

    /// The client has left, and what is left is cleaning up.
    fn is_hung_up(&self) -> bool {
        let mut descriptors =
            [PollFd::new(self.stream.as_fd(), PollFlags::from_bits_retain(nix::libc::POLLRDHUP))];
        matches!(poll(&mut descriptors, PollTimeout::ZERO), Ok(1..))
    }
}

/// Serves clients, one at a time, until SIGTERM or SIGINT, or until the one client of a connected descriptor has
/// left.
///
/// # Errors
/// What the set-up of the event loop says.
pub fn run(source: Source, service: &Arc<impl Service>) -> io::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut signals = Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            report: signal(SignalKind::user_defined1())?,
        };
        let result = match source {
            Source::Client(stream) => serve_one(stream, service, &mut signals).await,
            Source::Listener { file, socket } => {
                socket.set_nonblocking(true)?;
                let listener = UnixListener::from_std(socket)?;
                serve_all(&listener, service, &mut signals).await;
                drop(file);
                Ok(())
            }
        };
        service.stop();
        print_report(service);
        result
    })
}

/// If nobody reads it any more, that is no reason to end.
fn print_report(service: &Arc<impl Service>) {
    let mut stdout = io::stdout().lock();
    if let Err(error) = stdout.write_all(service.report().as_bytes()).and_then(|()| stdout.flush()) {
        tracing::warn!(%error, "the counters cannot be printed");
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    report: Signal,
}

impl Signals {
    /// Returns when the server is to end; prints the counters whenever it is asked to meanwhile.
    async fn end(&mut self, service: &Arc<impl Service>) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return tracing::info!("SIGTERM: ending"),
                _ = self.interrupt.recv() => return tracing::info!("SIGINT: ending"),
                _ = self.report.recv() => print_report(service),
            }
        }
    }
}

async fn serve_one(stream: UnixStream, service: &Arc<impl Service>, signals: &mut Signals) -> io::Result<()> {
    let mut session = Session::start(service, stream)?;
    tokio::select! {
        _ = &mut session.over => {}
        () = signals.end(service) => part(session).await,
    }
    Ok(())
}

async fn serve_all(listener: &UnixListener, service: &Arc<impl Service>, signals: &mut Signals) {
    let mut current: Option<Session> = None;
    loop {
        let over = async {
            match &mut current {
                Some(session) => _ = (&mut session.over).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = over => {
                tracing::info!("ready for the next client");
                current = None;
            }
            accepted = listener.accept() => {
                let stream = match accepted.and_then(|(stream, _)| stream.into_std()) {
                    Ok(stream) => stream,
                    Err(error) => {
                        // Out of descriptors, say: it may get better, and must not become a busy loop.
                        tracing::warn!(%error, "a client could not be accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                };
                if let Some(session) = &mut current {
                    let left = session.is_hung_up() && tokio::select! {
                        over = timeout(TAKEOVER, &mut session.over) => over.is_ok(),
                        () = signals.end(service) => break,
                    };
                    if !left {
                        tracing::warn!("a second client is refused: this drive serves one at a time");
                        continue;
                    }
                }
                tracing::info!("a client connected");
                current = match Session::start(service, stream) {
                    Ok(session) => Some(session),
                    Err(error) => {
                        tracing::error!(%error, "the client cannot be served");
                        None
                    }
                };
            }
            () = signals.end(service) => break,
        }
    }
    if let Some(session) = current {
        part(session).await;
    }
}

/// Ends a session from our side.
async fn part(session: Session) {
    let _ = session.stream.shutdown(std::net::Shutdown::Both);
    if timeout(PARTING, session.over).await.is_err() {
        tracing::error!("the session does not end; leaving it behind");
    }
}
