//! Several drives in one process, as a file says.

use std::io::BufRead;

use super::*;

fn serve(arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("serve").args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A directory with a file of drives `a`, `b`, … on memory, and what is added.
struct Site {
    directory: tempfile::TempDir,
    config: String,
    drives: usize,
}

impl Site {
    fn new(drives: usize, more: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut text = String::new();
        for name in ('a'..).take(drives) {
            text +=
                &format!("[[drive]]\nname = '{name}'\nsocket-path = '{name}.sock'\nnamespace = 'ram:1M'\n");
        }
        let path = directory.path().join("drives.toml");
        fs::write(&path, text + more).unwrap();
        Self { config: path.to_str().unwrap().into(), directory, drives }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn start(&self) -> Running<'_> {
        let process = serve(&["--config", &self.config, "-v"]).spawn().unwrap();
        let running = Running { process, site: self };
        for name in ('a'..).take(self.drives) {
            let socket = self.path(&format!("{name}.sock"));
            eventually("an answer", || UnixStream::connect(&socket).is_ok());
        }
        running
    }

    /// Runs it to its end: exit code, output, errors.
    fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = serve(&[&["--config", &self.config], arguments].concat()).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }
}

struct Running<'a> {
    process: Child,
    site: &'a Site,
}

impl Running<'_> {
    fn connect(&self, drive: &str) -> Client {
        Client::connect(&self.site.path(&format!("{drive}.sock")), Options::default()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id() as i32), signal).unwrap();
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn each_drive_has_its_clients_its_counters_and_its_place_in_the_log() {
    let site = Site::new(4, "");
    let mut server = site.start();
    let clients = ["a", "b", "c", "d"].map(|drive| server.connect(drive));
    for (times, client) in (1..).zip(&clients) {
        for _ in 0..times {
            client.region_read(0, 0x1c, &mut [0; 4]).unwrap();
        }
    }
    server.signal(Signal::SIGUSR1);
    let stdout = BufReader::new(server.process.stdout.take().unwrap());
    let mut lines = stdout.lines().map(Result::unwrap);
    let counters: Vec<String> =
        lines.by_ref().take_while(|line| !line.starts_with("counter d.resets ")).collect();
    for (drive, times) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
        let line = format!("counter {drive}.messages.region_read {times}");
        assert!(counters.contains(&line), "{line} in {counters:?}");
    }
    assert!(counters.iter().all(|line| line.split(' ').count() == 3), "{counters:?}");
    server.signal(Signal::SIGTERM);
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
    for (drive, client) in ["a", "b", "c", "d"].iter().zip(&clients) {
        assert!(client.device_info().is_err(), "{drive}'s client is told");
        assert!(!site.path(&format!("{drive}.sock")).exists());
    }
    let last: Vec<String> = lines.collect();
    assert!(last.contains(&"counter d.messages.region_read 4".into()), "{last:?}");
    let mut log = String::new();
    server.process.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    for drive in ["a", "b", "c", "d"] {
        let line = format!("drive{{name={drive}}}: outboard_server::control: a client connected");
        assert!(log.contains(&line), "{line} in {log}");
    }
}

#[test]
fn one_drive_that_cannot_start_keeps_all_from_starting() {
    let directory = tempfile::tempdir().unwrap();
    let live = directory.path().join("live");
    let _live = UnixListener::bind(&live).unwrap();
    for (socket, namespace, expected) in [
        ("z.sock", "file:none.img", "none.img: create it"),
        (live.to_str().unwrap(), "ram:1M", "running server"),
    ] {
        let more = format!("[[drive]]\nname = 'z'\nsocket-path = '{socket}'\nnamespace = '{namespace}'\n");
        let site = Site::new(2, &more);
        let (status, stdout, stderr) = site.run(&[]);
        assert_eq!((status, stdout.as_str()), (Some(1), ""));
        assert!(stderr.contains(expected), "{stderr}");
        assert!(stderr.starts_with(&format!("outboard-server: {}:9: ", site.config)), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(!site.path("a.sock").exists() && !site.path("z.sock").exists());
    }
}

#[test]
fn a_check_says_what_is_wrong_and_starts_nothing() {
    let site = Site::new(2, "");
    let server = site.start();
    // Also beside the server that uses the file.
    let (status, stdout, _) = site.run(&["--check"]);
    assert_eq!((status, stdout), (Some(0), format!("{}: 2 drives, nothing wrong\n", site.config)));
    drop(server);
    let wrong = Site::new(1, "queus = 4\n");
    let (status, stdout, stderr) = wrong.run(&["--check"]);
    assert_eq!((status, stdout.as_str()), (Some(1), ""));
    assert!(
        stderr.starts_with(&format!("outboard-server: {}:5: Unknown key 'queus'", wrong.config)),
        "{stderr}"
    );
    assert!(!wrong.path("a.sock").exists());
}

#[test]
fn what_a_vmm_is_told_names_the_socket_by_its_whole_path() {
    let site = Site::new(2, "");
    let socket = |name| site.path(name).to_str().unwrap().to_owned();
    let (status, stdout, _) = site.run(&["--print", "qemu"]);
    assert_eq!(status, Some(0));
    assert!(stdout.contains(&socket("a.sock")) && stdout.contains(&socket("b.sock")), "{stdout}");
    let (status, stdout, _) = site.run(&["--print", "libvirt", "--drive", "b"]);
    assert_eq!(status, Some(0));
    assert!(!stdout.contains(&socket("a.sock")) && stdout.contains(&socket("b.sock")), "{stdout}");
    let (status, _, stderr) = site.run(&["--print", "qemu", "--drive", "c"]);
    assert_eq!(status, Some(1));
    assert!(stderr.contains("no drive c; its drives are a, b"), "{stderr}");
    let output = nvme(&["--socket-path", "s", "--namespace", "file:none", "--print", "cloud-hypervisor"])
        .current_dir(&site.directory)
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && stdout.contains(&format!("socket=\"{}\"", socket("s"))), "{stdout}");
    assert!(complaint(&["--fd", "7", "--namespace", "ram:1M", "--print", "qemu"]).contains("--socket-path"));
}

#[test]
fn the_help_shows_a_file_that_can_be_used() {
    let output = serve(&["--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let example =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/config/example.toml")).unwrap();
    assert!(example.lines().all(|line| help.contains(line)), "{help}");
}

/// A full pipe at our output costs what would have been printed, not the clients.
#[test]
fn nobody_waits_for_whoever_stopped_reading_what_we_print() {
    let site = Site::new(8, "");
    let mut server = site.start();
    let first = server.connect("a");
    // A report has some 4 KiB and a pipe holds 64.
    for _ in 0..60 {
        server.signal(Signal::SIGUSR1);
        std::thread::sleep(Duration::from_millis(10));
    }
    let second = server.connect("b");
    assert!(first.device_info().is_ok() && second.device_info().is_ok());
    server.signal(Signal::SIGTERM);
    let start = Instant::now();
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(15));
    let mut log = String::new();
    server.process.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.contains("those before them were not read yet"), "{log}");
}

/// What one client can take is never what the next one needs: the limit is looked at before anybody is served.
#[test]
fn a_limit_of_descriptors_that_clients_could_reach_is_refused() {
    let site = Site::new(4, "");
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 4096 && exec \"$0\" serve --config \"$1\"", PROGRAM, &site.config])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("may have 4096; raise the limit") && text.lines().count() == 1, "{text}");
}

/// Its descriptors, of a client that asks for the doorbells' again and again, and takes no answer.
#[test]
fn a_client_that_takes_no_replies_costs_a_bounded_number_of_descriptors() {
    let site = Site::new(2, "");
    let server = site.start();
    let other = server.connect("b");
    let fds = || fs::read_dir(format!("/proc/{}/fd", server.process.id())).unwrap().count();
    let before = fds();
    let mut stream = UnixStream::connect(site.path("a.sock")).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    // VERSION 0.1 without capabilities; then GET_REGION_INFO of BAR 0 (vfio-user, 5.2 and 5.7), with room for all.
    let mut message = [&[1, 0, 1, 0, 20, 0, 0, 0], &[0; 8][..], &[0, 0, 1, 0]].concat();
    stream.write_all(&message).unwrap();
    message = [&[2, 0, 5, 0, 48, 0, 0, 0], &[0; 8][..], &[128, 0, 0, 0], &[0; 28][..]].concat();
    let mut sent = 0;
    while sent < 100_000 && stream.write_all(&message).is_ok() {
        sent += 1;
    }
    assert!(sent < 100_000, "the server reads on while the answers wait");
    let held = fds() - before;
    assert!(held > 200 && held <= outboard_vfio_user::limits::SESSION_DESCRIPTORS, "{held} after {sent}");
    assert!(other.device_info().is_ok());
    drop(stream);
    eventually("descriptors as before", || fds() <= before);
}

/// Mappings are the process's; a client has its share of them (limits::WATCHED_MAPPINGS).
#[test]
fn a_client_that_maps_all_it_may_leaves_room_for_the_next() {
    let site = Site::new(2, "");
    let server = site.start();
    let memory = SharedMemory::new("guest", 4096).unwrap();
    let map = |client: &Client, page: u64| {
        let memory = Memory { file: memory.as_fd(), offset: 0, length: 4096 };
        client.dma_map(Iova(page << 12), memory, Access::ReadWrite, Sharing::Descriptor)
    };
    let greedy = server.connect("a");
    let most = outboard_vfio_user::limits::WATCHED_MAPPINGS as u64;
    let mapped = (0..most).take_while(|&page| map(&greedy, page).is_ok()).count() as u64;
    assert!(mapped > most / 4 && mapped < most * 3 / 4, "{mapped} of {most}");
    let modest = server.connect("b");
    for page in 0..1000 {
        map(&modest, page).unwrap();
    }
    assert!(greedy.device_info().is_ok() && modest.device_info().is_ok());
}
