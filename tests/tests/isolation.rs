//! Four drives in one process, with a client process each. What one of them does to itself, the three others do not
//! notice: they lose nothing and are not slowed.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outboard_tests::process::program;

const DRIVES: [&str; 4] = ["a", "b", "c", "d"];

/// What a client did since its last report.
#[derive(Clone, Copy, Debug)]
struct Report {
    ios: f64,
    failed: f64,
    wrong: f64,
    p50: f64,
    p99: f64,
}

impl Report {
    fn parse(line: &str) -> Self {
        let value = |name: &str| {
            let word = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            word.and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{name} in '{line}'"))
        };
        let [ios, failed, wrong] = ["ios", "failed", "wrong"].map(value);
        Self { ios, failed, wrong, p50: value("p50"), p99: value("p99") }
    }

    fn lost_nothing(&self) -> bool {
        self.failed == 0.0 && self.wrong == 0.0
    }
}

/// A client in a process of its own (src/bin/steady-client.rs).
struct Client {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Client {
    fn tell(&mut self, command: &str) {
        writeln!(self.input.as_mut().expect("not told to end"), "{command}").unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().into()
    }

    fn report(&mut self) -> Report {
        self.tell("report");
        Report::parse(&self.line())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id() as i32), signal).unwrap();
    }

    /// Lets it verify all that it wrote, and leave.
    fn finish(mut self) -> Report {
        self.input = None;
        let report = Report::parse(&self.line());
        assert!(self.process.wait().unwrap().success());
        report
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// How a client goes wrong.
#[derive(Clone, Copy, Debug)]
enum Misdeed {
    Killed,
    Stopped,
    Truncated,
}

/// The server with its drives, and a client at each.
struct Stand {
    clients: Vec<Client>,
    rate: u32,
    server: Child,
    directory: tempfile::TempDir,
}

impl Stand {
    /// `keys`: of each drive, beside its name and its socket. `rate`: pairs of I/Os a second of each client.
    fn new(keys: [&str; 4], rate: u32) -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut config = String::new();
        for (name, keys) in DRIVES.iter().zip(keys) {
            config += &format!("[[drive]]\nname = '{name}'\nsocket-path = '{name}.sock'\n{keys}\n");
            fs::File::create(directory.path().join(format!("{name}.img"))).unwrap().set_len(4 << 20).unwrap();
        }
        let path = directory.path().join("drives.toml");
        fs::write(&path, config).unwrap();
        let server = Command::new(program()).arg("serve").arg("--config").arg(&path).spawn().unwrap();
        let mut stand = Self { clients: Vec::new(), rate, server, directory };
        for at in 0..DRIVES.len() {
            let client = stand.client(at);
            stand.clients.push(client);
        }
        stand
    }

    fn socket(&self, at: usize) -> PathBuf {
        self.directory.path().join(format!("{}.sock", DRIVES[at]))
    }

    fn client(&self, at: usize) -> Client {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !self.socket(at).exists() {
            assert!(Instant::now() < deadline, "drive {} is not served", DRIVES[at]);
            sleep(Duration::from_millis(10));
        }
        let mut process = Command::new(env!("CARGO_BIN_EXE_steady-client"))
            .arg(self.socket(at))
            .arg(self.rate.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (process.stdin.take(), BufReader::new(process.stdout.take().unwrap()));
        let mut client = Client { process, input, output };
        assert_eq!(client.line(), "ready", "drive {} has a client", DRIVES[at]);
        client
    }

    fn commit(&mut self, misdeed: Misdeed, offender: usize) {
        let client = &mut self.clients[offender];
        match misdeed {
            Misdeed::Killed => client.process.kill().unwrap(),
            Misdeed::Stopped => client.signal(Signal::SIGSTOP),
            Misdeed::Truncated => client.tell("truncate"),
        }
    }

    /// The drive serves on: the client that was stopped, or the next one.
    fn recover(&mut self, misdeed: Misdeed, offender: usize) {
        let client = &mut self.clients[offender];
        match misdeed {
            Misdeed::Killed => drop(client.process.wait()),
            Misdeed::Truncated => assert_eq!(client.line(), "over"),
            Misdeed::Stopped => {
                client.signal(Signal::SIGCONT);
                let report = client.report();
                return assert!(report.lost_nothing(), "{report:?}");
            }
        }
        self.clients[offender] = self.client(offender);
    }

    /// What the others do meanwhile.
    fn others(&mut self, offender: usize, time: Duration) -> Vec<Report> {
        let mut reports = |_| {
            let others = self.clients.iter_mut().enumerate().filter(|&(at, _)| at != offender);
            others.map(|(_, client)| client.report()).collect::<Vec<_>>()
        };
        reports(());
        sleep(time);
        reports(())
    }

    /// Everybody leaves, and the server ends.
    fn finish(mut self) {
        for client in std::mem::take(&mut self.clients) {
            let report = client.finish();
            assert!(report.lost_nothing() && report.ios > 0.0, "{report:?}");
        }
        kill(Pid::from_raw(self.server.id() as i32), Signal::SIGTERM).unwrap();
        assert_eq!(self.server.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Each kind of drive has its turn as the offender's. Who is starved does next to nothing of what it did before.
#[test]
fn the_others_lose_nothing_and_go_on() {
    const TIME: Duration = Duration::from_millis(400);
    let mut stand = Stand::new(
        [
            "namespace = 'ram:4M'",
            "namespace = 'ram:4M'\ndoorbells = 'posted'",
            "namespace = 'file:c.img'",
            "namespace = 'file:d.img'\ndoorbells = 'posted'",
        ],
        100,
    );
    for misdeed in [Misdeed::Killed, Misdeed::Stopped, Misdeed::Truncated] {
        for (offender, name) in DRIVES.iter().enumerate() {
            let before = stand.others(offender, TIME);
            stand.commit(misdeed, offender);
            let meanwhile = stand.others(offender, TIME);
            for (before, meanwhile) in before.iter().zip(&meanwhile) {
                let context = format!("{misdeed:?} {name}: {before:?}, then {meanwhile:?}");
                assert!(before.lost_nothing() && meanwhile.lost_nothing(), "{context}");
                assert!(meanwhile.ios > 0.2 * before.ios, "{context}");
            }
            stand.recover(misdeed, offender);
        }
    }
    stand.finish();
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints what `tests/run isolation` makes figures of: latency and throughput of the others with a misdeed, by those
/// without one in the window before it.
#[test]
#[ignore = "measures, and takes a minute"]
fn slowdown() {
    const TIME: Duration = Duration::from_millis(500);
    let rounds = std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    // A tenth of what two cores can do.
    let mut stand = Stand::new(["namespace = 'ram:4M'"; 4], 300);
    sleep(Duration::from_millis(500));
    for misdeed in [Misdeed::Killed, Misdeed::Stopped, Misdeed::Truncated] {
        let mut ratios = Vec::new();
        for _ in 0..rounds {
            let before = stand.others(0, TIME);
            stand.commit(misdeed, 0);
            let meanwhile = stand.others(0, TIME);
            stand.recover(misdeed, 0);
            assert!(before.iter().chain(&meanwhile).all(Report::lost_nothing), "{before:?} {meanwhile:?}");
            let ratio = |part: fn(&Report) -> f64| {
                median(meanwhile.iter().map(part)) / median(before.iter().map(part))
            };
            ratios.push([ratio(|report| report.p50), ratio(|report| report.p99), ratio(|report| report.ios)]);
        }
        for (index, name) in ["p50", "p99", "ios"].iter().enumerate() {
            let value = median(ratios.iter().map(|ratio| ratio[index]));
            println!("ratio {} {name} {value:.3}", format!("{misdeed:?}").to_lowercase());
        }
    }
    stand.finish();
}
