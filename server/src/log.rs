//! The log goes through a thread of its own. Whoever reads it may be slow, or have stopped reading, and no drive and
//! no client waits for that: what finds no room is left out, and counted.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// How many lines may wait.
const ROOM: usize = 1024;
/// How long the end waits for lines to be taken.
const PARTING: Duration = Duration::from_secs(1);

enum Entry {
    Line(Vec<u8>),
    /// Dropped when the lines before it are written.
    Mark(#[expect(dead_code, reason = "its end is the message")] SyncSender<()>),
}

/// Where lines are put. Every write is a whole line.
#[derive(Clone)]
pub struct Log {
    entries: SyncSender<Entry>,
    lost: Arc<AtomicU64>,
}

impl Log {
    /// Starts the thread that writes to `output`.
    ///
    /// # Errors
    /// What the creation of a thread says.
    pub fn new(output: impl Write + Send + 'static) -> io::Result<Self> {
        let (entries, received) = sync_channel(ROOM);
        let lost = Arc::<AtomicU64>::default();
        let theirs = lost.clone();
        std::thread::Builder::new().name("log".into()).spawn(move || run(&received, &theirs, output))?;
        Ok(Self { entries, lost })
    }

    /// Waits until what was logged is written, or for a second.
    pub fn settle(&self) {
        let (mark, written) = sync_channel(1);
        // No room: nobody reads.
        if self.entries.try_send(Entry::Mark(mark)).is_ok() {
            let _: Result<(), RecvTimeoutError> = written.recv_timeout(PARTING);
        }
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.entries.try_send(Entry::Line(line.into())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// If the output is closed, that is no reason to end.
fn run(entries: &Receiver<Entry>, lost: &AtomicU64, mut output: impl Write) {
    for entry in entries {
        if let Entry::Line(line) = entry {
            let _ = output.write_all(&line);
        }
        match lost.swap(0, Ordering::Relaxed) {
            0 => {}
            count => _ = writeln!(output, "{count} lines of the log were lost: it was not read in time"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::time::Instant;

    use super::*;

    #[test]
    fn nobody_waits_for_a_reader_that_has_stopped_and_what_it_missed_is_counted() {
        let (reader, writer) = io::pipe().unwrap();
        let mut log = Log::new(writer).unwrap();
        // A pipe holds 64 KiB, and the channel as many lines as it has room for.
        let start = Instant::now();
        let line = [&[b'.'; 99][..], b"\n"].concat();
        let count = 3 * ROOM as u64;
        for _ in 0..count {
            log.write_all(&line).unwrap();
        }
        assert!(start.elapsed() < Duration::from_secs(5));
        drop(log);
        let (mut read, mut lost) = (0, 0);
        for line in BufReader::new(reader).lines().map(Result::unwrap) {
            match line.split_once(' ') {
                None => read += 1,
                Some((number, _)) => lost += number.parse::<u64>().unwrap(),
            }
        }
        assert!(lost > 0);
        assert_eq!(read + lost, count);
    }

    #[test]
    fn what_was_logged_is_written_in_the_end() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut log = Log::new(writer).unwrap();
        for line in ["one\n", "two\n"] {
            log.write_all(line.as_bytes()).unwrap();
        }
        log.settle();
        let mut bytes = [0; 8];
        io::Read::read_exact(&mut reader, &mut bytes).unwrap();
        assert_eq!(&bytes, b"one\ntwo\n");
    }
}
