//! What the machine itself does with a function's disks.

use std::fs;
use std::path::Component;

use super::{Address, Host, HostError, entries};

impl Host {
    /// What of the disks behind a function, and of their partitions, is mounted, swapped to, or part of another disk.
    pub(super) fn uses(&self, address: Address) -> Result<Vec<String>, HostError> {
        let mounts = self.lines("self/mountinfo");
        let swaps = self.lines("swaps");
        let mut uses = Vec::new();
        for disk in self.disks(address)? {
            let path = format!("/dev/{disk}");
            let folder = self.sysfs.join("class/block").join(&disk);
            let number = fs::read_to_string(folder.join("dev")).unwrap_or_default();
            for mount in &mounts {
                // proc_pid_mountinfo(5): the third field is the device, the fifth the place; the source stands
                // after the type, behind a lone hyphen. Some file systems have a device of their own.
                let fields: Vec<_> = mount.split(' ').collect();
                let source = fields.iter().skip_while(|field| **field != "-").nth(2);
                if fields.get(2) == Some(&number.trim()) || source == Some(&path.as_str()) {
                    uses.push(format!("{path} is mounted at {}", fields.get(4).unwrap_or(&"?")));
                }
            }
            if swaps.iter().any(|swap| swap.split_whitespace().next() == Some(&path)) {
                uses.push(format!("{path} is swap space"));
            }
            for holder in entries(&folder.join("holders"))? {
                uses.push(format!("{path} is part of /dev/{holder}"));
            }
        }
        Ok(uses)
    }

    /// The names of the block devices behind a function.
    fn disks(&self, address: Address) -> Result<Vec<String>, HostError> {
        let folder = self.sysfs.join("class/block");
        let address = address.to_string();
        let all = entries(&folder)?;
        let behind = |name: &String| {
            let target = fs::read_link(folder.join(name)).unwrap_or_default();
            target.components().any(|part| matches!(part, Component::Normal(part) if *part == *address))
        };
        let mut disks: Vec<_> = all.iter().filter(|name| behind(name)).cloned().collect();
        // A drive that could have a second path (nvme0c0n1) is used as the disk that stands for all of them (nvme0n1),
        // which is behind none.
        let shared: Vec<_> = disks.iter().filter_map(|name| shared(name)).collect();
        for name in all {
            let partition = |disk: &String| {
                name.strip_prefix(disk.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('p'))
            };
            if shared.iter().any(partition) {
                disks.push(name);
            }
        }
        disks.sort();
        Ok(disks)
    }

    fn lines(&self, file: &str) -> Vec<String> {
        let text = fs::read_to_string(self.procfs.join(file)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

/// The disk that a path of it, nvmeXcYnZ, belongs to: nvmeXnZ.
fn shared(path: &str) -> Option<String> {
    let (subsystem, rest) = path.strip_prefix("nvme")?.split_once('c')?;
    let (_, namespace) = rest.split_once('n')?;
    Some(format!("nvme{subsystem}n{namespace}"))
}
