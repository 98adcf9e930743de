use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

/// A machine in a directory, laid out as the kernel does it.
struct Machine {
    folder: TempDir,
    host: Host,
}

const DRIVE: &str = "0000:00:03.0";

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let host = Host { sysfs: folder.path().join("sys"), procfs: folder.path().join("proc") };
        let machine = Self { folder, host };
        for directory in ["proc", "sys/class/block", "sys/bus/pci/devices"] {
            fs::create_dir_all(machine.folder.path().join(directory)).unwrap();
        }
        machine.file("sys/bus/pci/drivers_probe", "");
        machine.driver(VFIO_PCI);
        machine
    }

    /// One drive, in group 5, driven by nvme.
    fn with_a_drive() -> Self {
        let machine = Self::new();
        machine.function(DRIVE, "0x010802", Some(5), Some("nvme"));
        machine
    }

    fn file(&self, path: &str, content: &str) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    fn content(&self, path: &str) -> String {
        fs::read_to_string(self.folder.path().join(path)).unwrap()
    }

    fn driver(&self, name: &str) {
        self.file(&format!("sys/bus/pci/drivers/{name}/unbind"), "");
    }

    fn function(&self, address: &str, class: &str, group: Option<u32>, driver: Option<&str>) {
        let path = format!("sys/devices/pci0000:00/{address}");
        self.file(&format!("{path}/class"), &format!("{class}\n"));
        self.file(&format!("{path}/vendor"), "0x1b36\n");
        self.file(&format!("{path}/device"), "0x0010\n");
        self.file(&format!("{path}/driver_override"), "(null)\n");
        self.link(
            &format!("sys/bus/pci/devices/{address}"),
            &format!("../../../devices/pci0000:00/{address}"),
        );
        if let Some(driver) = driver {
            self.driver(driver);
            self.link(&format!("{path}/driver"), &format!("../../../bus/pci/drivers/{driver}"));
        }
        if let Some(group) = group {
            self.link(&format!("{path}/iommu_group"), &format!("../../../kernel/iommu_groups/{group}"));
            let devices = format!("sys/kernel/iommu_groups/{group}/devices");
            self.link(&format!("{devices}/{address}"), &format!("../../../../devices/pci0000:00/{address}"));
        }
    }

    fn process(&self, pid: u32, command: &str) {
        self.file(&format!("proc/{pid}/cmdline"), command);
        self.file(&format!("proc/{pid}/maps"), "7f00-7f10 r-xp 00000000 08:01 42 /usr/bin/true\n");
        self.link(&format!("proc/{pid}/fd/0"), "/dev/null");
    }

    fn disk(&self, name: &str, number: &str, place: &str) {
        self.file(&format!("sys/devices/{place}/{name}/dev"), &format!("{number}\n"));
        self.link(&format!("sys/class/block/{name}"), &format!("../../devices/{place}/{name}"));
    }

    /// What unbind says.
    fn unbound(&self) -> String {
        self.host.unbind(address(DRIVE)).unwrap_err().to_string()
    }

    /// What bind says.
    fn bound(&self) -> String {
        self.host.bind(address(DRIVE)).unwrap_err().to_string()
    }
}

#[test]
fn the_drives_of_a_machine_are_its_nvme_functions() {
    let machine = Machine::with_a_drive();
    machine.function("0000:00:02.0", "0x020000", Some(4), Some("e1000e"));
    machine.function("0000:00:01.0", "0x010802", None, None);
    let drives = machine.host.drives().unwrap();
    let bare = Function {
        address: address("00:01.0"),
        class: NVME,
        vendor: 0x1b36,
        device: 0x0010,
        driver: None,
        group: None,
        mates: vec![],
    };
    let drive =
        Function { address: address(DRIVE), driver: Some("nvme".into()), group: Some(5), ..bare.clone() };
    assert_eq!(drives, [bare, drive]);
    assert_eq!(
        serde_json::to_value(&drives[1]).unwrap(),
        serde_json::json!({
            "address": DRIVE, "class": "010802", "vendor": "1b36", "device": "0010", "driver": "nvme", "group": 5,
            "mates": [],
        })
    );
}

#[test]
fn a_machine_without_pci_has_no_drives() {
    let machine = Machine::new();
    fs::remove_dir_all(machine.host.sysfs.join("bus")).unwrap();
    assert_eq!(machine.host.drives().unwrap(), []);
    assert!(machine.bound().starts_with("There is no PCI function 0000:00:03.0"));
}

#[test]
fn a_file_that_says_no_number_is_named() {
    let machine = Machine::with_a_drive();
    machine.file("sys/devices/pci0000:00/0000:00:03.0/vendor", "0x11b36");
    let error = machine.host.drives().unwrap_err().to_string();
    assert!(error.contains("devices/0000:00:03.0/vendor cannot be read: it says \"0x11b36\""), "{error}");
}

#[test]
fn a_function_of_the_kernel_is_not_ready_and_the_command_is_told() {
    let machine = Machine::with_a_drive();
    let error = machine.host.function(address(DRIVE)).unwrap().ready().unwrap_err().to_string();
    assert_eq!(
        error,
        "0000:00:03.0 is driven by nvme, not by vfio-pci; hand it over with `outboard-server vfio bind 0000:00:03.0`"
    );
}

#[test]
fn a_group_with_a_device_of_the_kernel_is_not_ready_and_both_are_named() {
    let machine = Machine::new();
    machine.function(DRIVE, "0x010802", Some(5), Some(VFIO_PCI));
    machine.function("0000:00:00.0", "0x060000", Some(5), None);
    machine.function("0000:00:01.0", "0x060400", Some(5), Some("pcieport"));
    assert_eq!(machine.host.function(address(DRIVE)).unwrap().ready().unwrap(), 5, "bridges do no harm");
    machine.function("0000:00:04.0", "0x020000", Some(5), Some("e1000e"));
    let error = machine.host.function(address(DRIVE)).unwrap().ready().unwrap_err().to_string();
    assert!(
        error.starts_with("0000:00:03.0 shares IOMMU group 5 with 0000:00:04.0 (driven by e1000e); "),
        "{error}"
    );
}

#[test]
fn what_is_missing_is_said_before_anything_is_touched() {
    let machine = Machine::new();
    machine.function(DRIVE, "0x010802", None, Some("nvme"));
    assert!(machine.bound().contains("intel_iommu=on"), "{}", machine.bound());

    let machine = Machine::with_a_drive();
    fs::remove_dir_all(machine.host.sysfs.join("bus/pci/drivers/vfio-pci")).unwrap();
    assert!(machine.bound().contains("modprobe vfio-pci"), "{}", machine.bound());
    assert_eq!(machine.content("sys/devices/pci0000:00/0000:00:03.0/driver_override"), "(null)\n");
    assert_eq!(machine.content("sys/bus/pci/drivers/nvme/unbind"), "");
}

/// The files of this machine take what is written and do nothing, as a kernel does whose vfio-pci refuses.
#[test]
fn a_function_that_vfio_pci_refuses_gets_its_driver_back() {
    let machine = Machine::with_a_drive();
    assert!(machine.bound().starts_with("vfio-pci does not take 0000:00:03.0"), "{}", machine.bound());
    assert_eq!(machine.content("sys/devices/pci0000:00/0000:00:03.0/driver_override"), "\n");
    assert_eq!(machine.content("sys/bus/pci/drivers/nvme/unbind"), DRIVE);
    assert_eq!(machine.content("sys/bus/pci/drivers_probe"), DRIVE);
}

#[test]
fn a_function_that_vfio_pci_has_stays_there() {
    let machine = Machine::new();
    machine.function(DRIVE, "0x010802", Some(5), Some(VFIO_PCI));
    assert_eq!(machine.host.bind(address(DRIVE)).unwrap().driver.as_deref(), Some(VFIO_PCI));
    assert_eq!(machine.content("sys/bus/pci/drivers_probe"), "");
}

#[test]
fn a_function_is_taken_back_by_clearing_the_override_and_probing() {
    let machine = Machine::new();
    machine.function(DRIVE, "0x010802", Some(5), Some(VFIO_PCI));
    machine.file("sys/devices/pci0000:00/0000:00:03.0/driver_override", "vfio-pci\n");
    machine.host.unbind(address(DRIVE)).unwrap();
    assert_eq!(machine.content("sys/devices/pci0000:00/0000:00:03.0/driver_override"), "\n");
    assert_eq!(machine.content("sys/bus/pci/drivers/vfio-pci/unbind"), DRIVE);
    assert_eq!(machine.content("sys/bus/pci/drivers_probe"), DRIVE);
}

#[test]
fn a_function_of_another_driver_is_not_taken_back() {
    let machine = Machine::with_a_drive();
    assert_eq!(
        machine.unbound(),
        "0000:00:03.0 is driven by nvme, not by vfio-pci: there is nothing to take back"
    );
    assert_eq!(machine.content("sys/bus/pci/drivers/nvme/unbind"), "");
}

#[test]
fn who_is_not_root_is_told() {
    let error = HostError::File {
        path: "/sys/x".into(),
        verb: "written",
        source: io::Error::from_raw_os_error(nix::libc::EACCES),
    };
    assert_eq!(
        error.to_string(),
        "/sys/x cannot be written: Permission denied (os error 13) (this is for root)"
    );
}

/// A drive that vfio-pci has, and a process that holds nothing.
fn handed_over() -> Machine {
    let machine = Machine::new();
    machine.function(DRIVE, "0x010802", Some(5), Some(VFIO_PCI));
    machine.process(70, "/usr/sbin/cron\0-f\0");
    machine.file("proc/self/cmdline", "no number");
    machine
}

#[test]
fn who_holds_the_group_or_the_device_is_told_instead_of_waited_for() {
    let machine = handed_over();
    machine.process(71, "qemu-system-x86_64\0-M\0q35\0");
    machine.link("proc/71/fd/9", "/dev/vfio/5");
    machine.process(700, "outboard-vmm\0");
    machine.link("proc/700/fd/3", "anon_inode:[vfio-device]");
    machine.file("proc/700/fdinfo/3", "pos:\t0\nvfio-device-syspath: /sys/devices/pci0000:00/0000:00:03.0\n");
    assert_eq!(
        machine.unbound(),
        "0000:00:03.0 is held by process 71 (qemu-system-x86_64 -M q35), process 700 (outboard-vmm); end that first"
    );
    assert_eq!(machine.content("sys/bus/pci/drivers/vfio-pci/unbind"), "");
}

#[test]
fn who_holds_the_character_device_is_told() {
    let machine = handed_over();
    machine.file("sys/devices/pci0000:00/0000:00:03.0/vfio-dev/vfio2/dev", "511:2");
    machine.process(71, "a\0");
    machine.link("proc/71/fd/9", "/dev/vfio/devices/vfio2");
    assert!(machine.unbound().contains("held by process 71 (a)"));
}

#[test]
fn who_holds_another_device_does_not_count() {
    let machine = handed_over();
    machine.process(71, "a\0");
    machine.link("proc/71/fd/3", "anon_inode:[vfio-device]");
    machine.file("proc/71/fdinfo/3", "vfio-device-syspath: /sys/devices/pci0000:00/0000:00:04.0\n");
    machine.process(72, "b\0");
    machine.link("proc/72/fd/3", "/dev/vfio/50");
    machine.link("proc/72/fd/4", "anon_inode:[vfio-device]");
    machine.file("proc/72/fdinfo/4", "pos:\t0\n");
    machine.process(73, "c\0");
    machine.link("proc/73/fd/3", "/dev/vfio/vfio");
    machine.host.unbind(address(DRIVE)).unwrap();
}

#[test]
fn a_descriptor_or_a_mapping_of_an_unknown_device_counts() {
    let machine = handed_over();
    machine.process(71, "a\0");
    machine.link("proc/71/fd/3", "anon_inode:[vfio-device]");
    machine.file("proc/71/fdinfo/3", "pos:\t0\n");
    machine.process(72, "b\0");
    machine.file("proc/72/maps", "7f00-7f10 rw-s 00001000 00:0f 1035 anon_inode:[vfio-device]\n");
    let error = machine.unbound();
    assert!(error.contains("held by process 71 (a), process 72 (b)"), "{error}");
}

#[test]
fn a_command_line_fits_into_a_line() {
    let machine = handed_over();
    machine.process(71, &format!("evil\x1b[2J\n\0{}", "x".repeat(1000)));
    machine.link("proc/71/fd/9", "/dev/vfio/5");
    let error = machine.unbound();
    assert!(error.contains("process 71 (evil?[2J? xxx"), "{error}");
    assert!(error.len() < 250 && !error.contains(char::is_control), "{error}");
}

#[test]
fn a_drive_that_the_machine_uses_is_not_taken_away() {
    let machine = Machine::with_a_drive();
    let place = "pci0000:00/0000:00:03.0/nvme/nvme0";
    machine.disk("nvme0n1", "259:0", place);
    machine.disk("nvme0n1p1", "259:1", &format!("{place}/nvme0n1"));
    machine.disk("nvme1n1", "259:7", "pci0000:00/0000:00:04.0/nvme/nvme1");
    machine.file("proc/self/mountinfo", "22 1 259:7 / / rw - ext4 /dev/nvme1n1 rw\n");
    assert!(machine.bound().starts_with("vfio-pci does not take"), "the other drive is none of its business");

    machine.file(
        "proc/self/mountinfo",
        "22 1 259:1 / / rw shared:1 - ext4 /dev/root rw\n23 1 0:30 / /d rw - btrfs /dev/nvme0n1 rw\n",
    );
    machine.file("proc/swaps", "Filename Type Size Used Priority\n/dev/nvme0n1p1 partition 1 0 -2\n");
    machine.file("sys/class/block/nvme0n1/holders/dm-0/dev", "");
    assert_eq!(
        machine.bound(),
        "0000:00:03.0 is in use by this machine: /dev/nvme0n1 is mounted at /d, /dev/nvme0n1 is part of /dev/dm-0, \
         /dev/nvme0n1p1 is mounted at /, /dev/nvme0n1p1 is swap space; end that first"
    );
}

#[test]
fn a_drive_with_a_second_path_is_in_use_by_its_shared_disk() {
    let machine = Machine::with_a_drive();
    machine.disk("nvme2c0n1", "259:0", "pci0000:00/0000:00:03.0/nvme/nvme0");
    machine.disk("nvme2n1", "259:1", "virtual/nvme-subsystem/nvme-subsys2");
    machine.disk("nvme2n1p3", "259:2", "virtual/nvme-subsystem/nvme-subsys2/nvme2n1");
    machine.disk("nvme2n11", "259:3", "virtual/nvme-subsystem/nvme-subsys2");
    machine.file("proc/self/mountinfo", "1 1 259:2 / /a rw - xfs x rw\n1 1 259:3 / /b rw - xfs x rw\n");
    assert_eq!(
        machine.bound(),
        "0000:00:03.0 is in use by this machine: /dev/nvme2n1p3 is mounted at /a; end that first"
    );
}
