//! The control plane: clients come and go, signals arrive. One thread, on tokio; no data passes here.
//!
//! Each service has a task of its own, and whatever one of them waits for, the others do not.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use outboard_vfio_user::listen::{SocketFile, Source};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;
use tracing::{Instrument, Span};

/// How long a client that connects waits for one that hung up to be cleaned up after. QEMU waits 5 s for a reply.
const TAKEOVER: Duration = Duration::from_secs(4);
/// How long a session may take to end when it is told to, and who reads the counters to take the last of them.
const PARTING: Duration = Duration::from_secs(5);

/// What is served.
pub trait Service: Send + Sync + 'static {
    /// Serves one client until it leaves. Blocks; shutting the stream down ends it.
    fn serve(&self, stream: UnixStream);

    /// Finishes what is under way and makes it durable.
    fn stop(&self);

    /// The counters, by name, in order.
    fn counters(&self) -> Vec<(String, u64)>;
}

/// A service, and where its clients come from.
pub struct Served<S> {
    /// What stands before the names of its counters; none where it is the only one.
    pub name: Option<String>,
    /// What the log calls it.
    pub span: Span,
    /// Where its clients come from.
    pub source: Source,
    /// What they are served.
    pub service: Arc<S>,
}

/// A [`Source`], for tokio.
enum Clients {
    Listener { file: Option<SocketFile>, socket: UnixListener },
    One(UnixStream),
}

impl Clients {
    fn new(source: Source) -> io::Result<Self> {
        Ok(match source {
            Source::Client(stream) => Self::One(stream),
            Source::Listener { file, socket } => {
                socket.set_nonblocking(true)?;
                Self::Listener { file, socket: UnixListener::from_std(socket)? }
            }
        })
    }
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
        let (service, theirs, span) = (service.clone(), stream.try_clone()?, Span::current());
        std::thread::Builder::new().name("session".into()).spawn(move || {
            span.in_scope(|| service.serve(theirs));
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

    /// Ends it from our side.
    async fn part(self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        if timeout(PARTING, self.over).await.is_err() {
            tracing::error!("the session does not end; leaving it behind");
        }
    }
}

/// Serves clients, one at a time to each service, until SIGTERM or SIGINT, or until no service may have another: the
/// clients of connected descriptors have left.
///
/// # Errors
/// What the set-up says; then nothing was served, but where it is about the client of a connected descriptor.
pub fn run<S: Service>(served: Vec<Served<S>>) -> io::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut report = signal(SignalKind::user_defined1())?;
        let mut reports = Reports::new(&served);
        let (end, ending) = watch::channel(());
        let ready: Vec<_> = served
            .into_iter()
            .map(|Served { span, source, service, .. }| {
                let clients = Clients::new(source)?;
                Ok(serve(clients, service, ending.clone()).instrument(span))
            })
            .collect::<io::Result<_>>()?;
        let mut tasks: JoinSet<_> = ready.into_iter().collect();
        tracing::info!("ready");
        let mut result = Ok(());
        loop {
            tokio::select! {
                _ = terminate.recv() => { tracing::info!("SIGTERM: ending"); break }
                _ = interrupt.recv() => { tracing::info!("SIGINT: ending"); break }
                _ = report.recv() => reports.print(),
                over = tasks.join_next() => match over {
                    None => break,
                    Some(over) => result = result.and(over.unwrap_or_else(|error| Err(error.into()))),
                },
            }
        }
        let _ = end.send(());
        while tasks.join_next().await.is_some() {}
        if reports.settle().await {
            reports.print();
            reports.settle().await;
        }
        result
    })
}

/// The counters of all services, for who reads what we print.
struct Reports<S> {
    services: Vec<(String, Arc<S>)>,
    /// The report that is being printed.
    printing: Option<oneshot::Receiver<()>>,
}

impl<S: Service> Reports<S> {
    fn new(served: &[Served<S>]) -> Self {
        let prefix = |name: &Option<String>| name.as_ref().map(|name| format!("{name}.")).unwrap_or_default();
        let services = served.iter().map(|served| (prefix(&served.name), served.service.clone()));
        Self { services: services.collect(), printing: None }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (prefix, service) in &self.services {
            for (name, count) in service.counters() {
                let _ = writeln!(text, "counter {prefix}{name} {count}");
            }
        }
        text
    }

    /// On a thread of its own: who reads may have stopped doing so, and then nobody else is to wait.
    fn print(&mut self) {
        if self.printing.as_mut().is_some_and(|printing| printing.try_recv() == Err(TryRecvError::Empty)) {
            return tracing::warn!("the counters are not printed: those before them were not read yet");
        }
        let (done, over) = oneshot::channel();
        let text = self.text();
        let started = std::thread::Builder::new().name("report".into()).spawn(move || {
            let mut stdout = io::stdout().lock();
            if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
                tracing::warn!(%error, "the counters cannot be printed");
            }
            // An error: the server has ended.
            let _ = done.send(());
        });
        match started {
            Ok(_) => self.printing = Some(over),
            Err(error) => tracing::warn!(%error, "the counters cannot be printed"),
        }
    }

    /// Waits until what was printed is read, within a bound: false if it is not.
    async fn settle(&mut self) -> bool {
        match self.printing.take() {
            Some(printing) => timeout(PARTING, printing).await.is_ok(),
            None => true,
        }
    }
}

/// Serves clients until `ending`, or until there will be no more; then finishes what is under way.
async fn serve(
    clients: Clients,
    service: Arc<impl Service>,
    mut ending: watch::Receiver<()>,
) -> io::Result<()> {
    let result = match clients {
        Clients::One(stream) => serve_one(stream, &service, &mut ending).await,
        Clients::Listener { file, socket } => {
            serve_all(&socket, &service, &mut ending).await;
            drop(file);
            Ok(())
        }
    };
    // It may wait for a disk.
    let stopped = spawn_blocking(move || service.stop()).await;
    result.and(stopped.map_err(Into::into))
}

/// Returns when the server is to end.
async fn ended(ending: &mut watch::Receiver<()>) {
    // An error: whoever would say so is gone, which says it, too.
    let _ = ending.changed().await;
}

async fn serve_one(
    stream: UnixStream,
    service: &Arc<impl Service>,
    ending: &mut watch::Receiver<()>,
) -> io::Result<()> {
    let mut session = Session::start(service, stream)?;
    tokio::select! {
        _ = &mut session.over => {}
        () = ended(ending) => session.part().await,
    }
    Ok(())
}

async fn serve_all(listener: &UnixListener, service: &Arc<impl Service>, ending: &mut watch::Receiver<()>) {
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
                        () = ended(ending) => break,
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
            () = ended(ending) => break,
        }
    }
    if let Some(session) = current {
        session.part().await;
    }
}
