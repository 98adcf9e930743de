//! Which processes hold a function that vfio-pci has.

use std::fmt;
use std::fs;
use std::path::Path;

use super::{Function, Host, HostError, entries};

/// A process that holds a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// Its command line, the beginning of it.
    pub command: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.command)
    }
}

/// What the descriptor of a function that was opened by its group looks like, and a mapping of it.
const DEVICE: &str = "anon_inode:[vfio-device]";

/// How much of a command line is shown.
const COMMAND: usize = 80;

impl Host {
    /// Who holds a function: its group, the function itself, or pages of it. Root sees all processes, others their own.
    ///
    /// Kernels before `vfio-device-syspath` (in fdinfo) do not say which function a descriptor is of, and none says it
    /// of a mapping: who has one and has no other group open counts.
    ///
    /// # Errors
    /// [`HostError::File`]
    pub fn holders(&self, function: &Function) -> Result<Vec<Holder>, HostError> {
        let mut paths: Vec<_> = function.group.iter().map(|group| format!("/dev/vfio/{group}")).collect();
        for device in entries(&self.path(function.address).join("vfio-dev"))? {
            paths.push(format!("/dev/vfio/devices/{device}"));
        }
        let mut pids: Vec<u32> = entries(&self.procfs)?.iter().filter_map(|name| name.parse().ok()).collect();
        pids.sort_unstable();
        let holds = |pid: &u32| holds(&self.procfs.join(pid.to_string()), function, &paths);
        let holder = |pid: u32| Holder { pid, command: command(&self.procfs.join(pid.to_string())) };
        Ok(pids.into_iter().filter(holds).map(holder).collect())
    }
}

/// Whether a process holds a function. One that has ended meanwhile, or may not be looked at, does not.
fn holds(process: &Path, function: &Function, paths: &[String]) -> bool {
    let address = function.address.to_string();
    let mut unknown = false;
    let mut elsewhere = false;
    for descriptor in entries(&process.join("fd")).unwrap_or_default() {
        let Ok(target) = fs::read_link(process.join("fd").join(&descriptor)) else { continue };
        let target = target.to_string_lossy();
        if paths.iter().any(|path| *path == target) {
            return true;
        }
        if target == DEVICE {
            let info = fs::read_to_string(process.join("fdinfo").join(&descriptor)).unwrap_or_default();
            match info.lines().find_map(|line| line.strip_prefix("vfio-device-syspath:")) {
                Some(path) if Path::new(path.trim()).ends_with(&address) => return true,
                Some(_) => elsewhere = true,
                None => unknown = true,
            }
        }
        // /dev/vfio/vfio is the container, which holds nothing.
        elsewhere |= target.strip_prefix("/dev/vfio/").is_some_and(|name| name != "vfio");
    }
    let mapped = || fs::read_to_string(process.join("maps")).is_ok_and(|maps| maps.contains(DEVICE));
    !elsewhere && (unknown || mapped())
}

/// What a process was started as, fit for one line.
fn command(process: &Path) -> String {
    let read = |file: &str| fs::read(process.join(file)).ok().filter(|bytes| !bytes.is_empty());
    let bytes = read("cmdline").or_else(|| read("comm")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_end_matches(['\0', '\n']).replace('\0', " ");
    let shown: String = text.chars().take(COMMAND).map(|c| if c.is_control() { '?' } else { c }).collect();
    if shown.len() < text.len() { format!("{shown}…") } else { shown }
}
